// One row: what it is, its prompt and its answer, with what is trained on in colour.

import { h } from "./dom.js";
import { badge, shardLink, waiting } from "./bits.js";
import { count, words } from "./format.js";
import { embedded, need } from "./source.js";

/** @type {Set<string>} rows that are shown whole */
const opened = new Set();

/** @param {any} given @param {number} stamp @returns {HTMLElement} */
export function row(given, stamp) {
  const key = `${given.shard} ${given.row} ${given.rejected}`;
  let shown = given, found = null;
  if (opened.has(key)) {
    found = need(`api/row?shard=${given.shard}&row=${given.row}&rejected=${given.rejected}`, stamp);
    shown = found.value ?? given;
  }
  return h("article", { class: "row", "data-key": key, "aria-label": `Row ${given.prompt_id}` },
    facts(shown),
    given.note && given.note !== "rejected" && h("p", { class: "dim" }, given.note),
    shown.gone ? h("p", { class: "note" }, "This row is gone.") : text(shown),
    shown.rejected && h("p", { class: "message" }, shown.detail),
    given.more && (found ? !found.value && waiting(found, "The whole row") : more(key)));
}

/** @param {string} key */
function more(key) {
  if (embedded()) return h("p", { class: "dim" }, "The rest is not in this report.");
  return h("button", { type: "button", class: "more", on: { click: () => { opened.add(key); window.dispatchEvent(new Event("hashchange")); } } }, "Show all");
}

/** @param {any} one */
function facts(one) {
  const parts = one.rejected
    ? [badge("failed"), words(one.reason ?? "")]
    : [`${count(one.prompt_tokens)} + ${count(one.output_tokens)} tokens`, `${count(one.loss_tokens)} trained`, `ended by ${one.finish}`, one.origin, one.setting && `setting ${one.setting}`];
  return h("div", { class: "facts" }, shardLink(one.shard), h("span", { class: "mono dim" }, String(one.prompt_id ?? "").slice(0, 12)), h("bdi", null, one.source ?? ""), parts.filter(Boolean).map((part) => h("span", null, part)));
}

/** @param {any} one */
function text(one) {
  const parts = one.pieces.map((piece) => (piece.kind === "left_out"
    ? h("span", { class: "left-out" }, ` … ${piece.text} not shown … `)
    : h("span", { class: piece.special ? `${piece.kind} special` : piece.kind }, piece.text)));
  return h("div", { class: "text", dir: "ltr", tabindex: 0, role: "group", "aria-label": "Prompt and answer" }, parts.length ? parts : h("span", { class: "dim" }, "no text"));
}
