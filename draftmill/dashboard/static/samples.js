// The sample browser: rows to read, by how they stand out or by a text that they hold.

import { h } from "./dom.js";
import { choice, waiting } from "./bits.js";
import { count, plural } from "./format.js";
import { ask, place } from "./place.js";
import { row } from "./row.js";
import { embedded, need } from "./source.js";

const KINDS = [["random", "random"], ["shortest", "shortest"], ["longest", "longest"], ["repetitive", "repeat themselves most"], ["repeated", "most repeated in a shard"], ["rejected", "rejected"], ["search", "holding a text"]];
const FIRST = { start: null, skip: null };

/** How often "Show" was pressed: rows stay while somebody reads them, and are asked for again when he says so. */
let shows = 0;

/** @param {any} app @returns {any[]} */
export function samples(app) {
  const { asked } = place();
  const kind = asked.get("kind") ?? (asked.get("text") ? "search" : "random");
  const ready = kind !== "search" || asked.get("text");
  return [
    h("h1", null, "Samples"),
    controls(app, asked, kind),
    h("p", { class: "legend dim" }, h("span", { class: "prompt" }, "prompt"), h("span", { class: "trained" }, "trained on"), h("span", { class: "masked" }, "not trained on"), h("span", { class: "special" }, "special token")),
    ready ? results(asked, kind) : h("p", { class: "dim" }, "Type a text to look for in answers, prompts and ids."),
  ];
}

/** @param {any} app @param {URLSearchParams} asked @param {string} kind */
function controls(app, asked, kind) {
  const fixed = Boolean(embedded());
  const audits = need("api/quality", app.revision).value;
  const sources = [["", "all"], ...Object.keys(audits?.by_source ?? {}).map((name) => [name, name])];
  const kinds = fixed ? KINDS.filter(([name]) => name !== "search") : KINDS;
  return h("form", { class: "controls", role: "search", on: { submit: (/** @type {any} */ event) => submit(event) } },
    choice("Rows", "kind", kinds, kind, (value) => ask({ kind: value, ...FIRST })),
    !fixed && choice("Source", "source", sources, asked.get("source") ?? "", (value) => ask({ source: value, ...FIRST })),
    !fixed && field("Shard", "shard", asked.get("shard") ?? "", "all"),
    !fixed && field("Text", "text", asked.get("text") ?? "", "search"),
    !fixed && h("button", { type: "submit" }, "Show"),
    !fixed && kind !== "search" && h("button", { type: "button", on: { click: () => ask({ seed: Number(asked.get("seed") ?? 0) + 1 }) } }, "Others"));
}

/** @param {string} label @param {string} name @param {string} value @param {string} hint */
function field(label, name, value, hint) {
  return h("label", { class: "field" }, h("span", null, label), h("input", { name, value, placeholder: hint, size: 14, autocomplete: "off", spellcheck: "false" }));
}

/** @param {SubmitEvent} event */
function submit(event) {
  event.preventDefault();
  const given = Object.fromEntries(new FormData(/** @type {HTMLFormElement} */ (event.target)));
  const kind = given.text ? "search" : given.kind === "search" ? "random" : given.kind;
  shows += 1;
  ask({ ...given, kind, ...FIRST });
  window.dispatchEvent(new Event("hashchange"));
}

/** @param {URLSearchParams} asked @param {string} kind */
function results(asked, kind) {
  const query = new URLSearchParams({ kind });
  for (const name of embedded() ? [] : ["source", "shard", "seed", ...(kind === "search" ? ["start", "skip", "text"] : [])]) {
    if (asked.get(name)) query.set(name, asked.get(name));
  }
  const found = need(`api/samples?${query}`, shows);
  if (!found.value) return waiting(found, "Rows");
  const { rows, read, shards, next, tokenizer } = found.value;
  return [
    h("p", { class: "dim" }, `${plural(rows.length, "row")} from ${count(read)} of ${plural(shards, "shard")}.`, read < shards && kind !== "random" && kind !== "search" ? " Their audits say that these are the shards to read." : "",
      tokenizer || !rows.length ? "" : " The target's tokenizer is not on this machine, so texts are shown as they were stored, without the loss mask of single tokens."),
    rows.map((one) => row(one, shows)),
    next !== null && h("p", null, h("button", { type: "button", on: { click: () => ask(next) } }, `Search on in shard ${count(next.start + 1)}`)),
  ];
}
