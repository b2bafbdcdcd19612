// Small parts that several views share.

import { h } from "./dom.js";
import { percent, words } from "./format.js";
import { address } from "./place.js";

/** @param {string} title @param {any} value @param {...any} more @returns {HTMLElement} */
export function card(title, value, ...more) {
  return h("div", { class: "card" }, h("span", { class: "dim" }, title), h("b", null, value), more.map((one) => one && h("span", { class: "dim" }, one)));
}

/**
 * A state as a word with a sign, so that colour is not all that tells it.
 * @param {string | null} state
 */
export function badge(state) {
  const signs = { __proto__: null, done: "✓", pass: "✓", free: "✓", running: "▸", stale: "…", failed: "✕", fail: "✕", busy: "✕", interrupted: "!", lost: "!", unknown: "?" };
  return h("span", { class: `badge is-${state ?? "none"}` }, `${signs[state ?? ""] ?? "·"} ${words(state ?? "none")}`);
}

/** @param {number} done @param {number | null} whole @param {string} label */
export function bar(done, whole, label) {
  const share = whole ? Math.min(done / whole, 1) : 0;
  return h("div", { class: "bar", role: "img", "aria-label": `${label}: ${percent(share)}` },
    h("div", { style: { width: `${share * 100}%` } }));
}

/** @param {string} id @param {string} label what it shows, for those who cannot see it @param {any} figure */
export function plot(id, label, figure) {
  return h("div", { id, class: "plot", role: "img", "aria-label": label, figure });
}

/** @param {string[]} heads @param {any[][]} rows @param {{class?: string, label?: string}} [props] */
export function table(heads, rows, props = {}) {
  return h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": props.label ?? heads[0] },
    h("table", { class: props.class },
      h("thead", null, h("tr", null, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", null, rows.map((row) => h("tr", null, row.map((cell, place) => h(place ? "td" : "th", place ? null : { scope: "row" }, cell)))))));
}

/** @param {string} name @param {string} [text] */
export function shardLink(name, text) {
  return h("a", { href: address("shards", { open: name }), class: "mono" }, text ?? name);
}

/** @param {import("./source.js").Held} found what is not there yet, in a sentence @param {string} what */
export function waiting(found, what) {
  if (found.error) return h("p", { class: "note" }, `${what}: ${found.error}.`);
  return h("p", { class: "dim" }, found.value === null && !found.busy ? `${what}: nothing yet.` : `Reading ${what.toLowerCase()} …`);
}

/**
 * A labelled choice.
 * @param {string} label @param {string} name @param {[string, string][]} options value and text
 * @param {string} value @param {(value: string) => void} changed
 */
export function choice(label, name, options, value, changed) {
  return h("label", { class: "field" }, h("span", null, label),
    h("select", { name, on: { change: (/** @type {any} */ event) => changed(event.target.value) } },
      options.map(([key, text]) => h("option", { value: key, selected: key === value }, text))));
}
