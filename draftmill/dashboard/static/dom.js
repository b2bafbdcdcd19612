// Elements are made here and nowhere else. Texts only ever become text nodes, with characters that nobody can see, or
// that would turn the writing direction, spelt out.

const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu;

/**
 * A text with control, format and unassigned characters as ⟦U+001B⟧; newline and tab stay.
 * @param {unknown} text
 * @returns {string}
 */
export function visible(text) {
  return String(text).replace(HIDDEN, (c) => (c === "\n" || c === "\t" ? c : spelt(c)));
}

/** @param {string} c */
function spelt(c) {
  return `⟦U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟧`;
}

/**
 * @typedef {Node | string | number | null | undefined | false | Child[]} Child
 * @typedef {Object<string, any>} Props attributes; `on` holds handlers, `style` CSS properties, `figure` a plot
 */

/**
 * An element with attributes and children.
 * @param {string} name
 * @param {Props | null} [props]
 * @param {...Child} children
 * @returns {HTMLElement & {handlers?: Object<string, Function>, figure?: any}}
 */
export function h(name, props, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(props ?? {})) give(element, key, value);
  append(element, children);
  return element;
}

/** @param {any} element @param {string} key @param {any} value */
function give(element, key, value) {
  if (value === undefined || value === null || value === false) return;
  if (key === "on") listen(element, value);
  else if (key === "figure") element.figure = value;
  else if (key === "style") for (const [name, part] of Object.entries(value)) element.style.setProperty(name, part);
  // What a person typed, or an option stands for, is asked for as it is.
  else element.setAttribute(key, value === true ? "" : key === "value" ? String(value) : visible(value));
}

/** Handlers are looked up when an event comes, so that an element that stays can be given new ones. */
function listen(element, handlers) {
  element.handlers = handlers;
  for (const type of Object.keys(handlers)) {
    element.addEventListener(type, (/** @type {Event} */ event) => element.handlers?.[type]?.(event));
  }
}

/** @param {Node} element @param {Child[]} children */
function append(element, children) {
  for (const child of children) {
    if (child === undefined || child === null || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.appendChild(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
}
