// Bring what is shown into the form of what is to be shown, and leave alone what is the same already: focus, selection,
// scrolling, opened details and plots survive an update that comes every second.

/**
 * @param {Element} shown
 * @param {Element} wanted is used up
 * @param {(element: any) => void} drawn called for each element with a figure that stays or comes
 */
export function morph(shown, wanted, drawn) {
  const old = [...shown.childNodes];
  const next = [...wanted.childNodes];
  next.forEach((node, place) => {
    const before = old[place];
    if (before === undefined) shown.appendChild(node);
    else if (!alike(before, node)) shown.replaceChild(node, before);
    else return patch(before, node, drawn);
    if (node instanceof Element) fresh(node, drawn);
  });
  old.slice(next.length).forEach((node) => node.remove());
}

/** @param {Node} a @param {Node} b */
function alike(a, b) {
  if (a.nodeType !== b.nodeType || a.nodeName !== b.nodeName) return false;
  return !(a instanceof Element && b instanceof Element) || (a.id === b.id && a.getAttribute("data-key") === b.getAttribute("data-key"));
}

/** @param {any} before @param {any} node @param {(element: any) => void} drawn */
function patch(before, node, drawn) {
  if (!(node instanceof Element)) {
    if (before.data !== node.data) before.data = node.data;
    return;
  }
  attributes(before, node);
  before.handlers = node.handlers;
  if (node.figure !== undefined) {
    before.figure = node.figure;
    drawn(before);
    return;
  }
  morph(before, node, drawn);
}

/** @param {Element} before @param {Element} node */
function attributes(before, node) {
  const kept = before instanceof HTMLDetailsElement ? ["open"] : before.figure !== undefined ? ["class", "style"] : [];
  for (const { name } of [...before.attributes]) {
    if (!node.hasAttribute(name) && !kept.includes(name)) before.removeAttribute(name);
  }
  for (const { name, value } of [...node.attributes]) {
    if (before.getAttribute(name) === value || kept.includes(name)) continue;
    before.setAttribute(name, value);
    // What a person typed or chose is a property of its own.
    if (name === "value" && before instanceof HTMLInputElement) before.value = value;
    if (name === "selected" && before instanceof HTMLOptionElement) before.selected = true;
  }
}

/** @param {any} element @param {(element: any) => void} drawn */
function fresh(element, drawn) {
  if (element.figure !== undefined) drawn(element);
  for (const child of element.children) fresh(child, drawn);
}
