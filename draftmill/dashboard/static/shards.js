// Shards: a table to sort and to filter, and one shard opened.

import { h } from "./dom.js";
import { badge, choice, shardLink, waiting } from "./bits.js";
import { count, duration, moment, plural, short, words } from "./format.js";
import { ask, place } from "./place.js";
import { shard } from "./shard.js";
import { need } from "./source.js";

const PAGE = 50;
const COLUMNS = [["name", "shard"], ["state", "state"], ["at", "stage"], ["verdict", "audit"], ["split", "split"], ["window", "window"], ["rows", "rows"], ["useful", "useful"], ["rejected", "rejected"], ["tokens", "tokens"], ["seconds", "work"], ["modified", "changed"]];
const STATES = ["done", "running", "stale", "failed", "interrupted", "waiting"];

/** @param {any} app @returns {any[]} */
export function shards(app) {
  const { asked } = place();
  const open = asked.get("open");
  if (open) return shard(app, open);
  const found = need("api/shards", Math.floor(app.number / 4));
  if (!found.value) return [h("h1", null, "Shards"), waiting(found, "Shards")];
  const chosen = sorted(filtered(found.value, asked), asked.get("sort") ?? "", asked.get("down") === "1");
  const last = Math.max(0, Math.ceil(chosen.length / PAGE) - 1);
  const page = Math.min(Math.max(Math.trunc(Number(asked.get("page"))) || 0, 0), last);
  return [
    h("h1", null, "Shards"),
    filters(found.value, asked),
    h("p", { class: "dim", role: "status" }, `${count(chosen.length)} of ${plural(found.value.length, "shard")}.`),
    grid(chosen.slice(page * PAGE, (page + 1) * PAGE), asked),
    pager(chosen.length, page),
  ];
}

/** @param {any[]} rows @param {URLSearchParams} asked */
function filtered(rows, asked) {
  const text = (asked.get("text") ?? "").toLowerCase();
  const is = (/** @type {string} */ name) => (/** @type {any} */ row) => !asked.get(name) || String(row[name] ?? "none") === asked.get(name);
  return rows.filter((row) => row.name.includes(text) && ["state", "split", "window", "verdict", "at"].every((name) => is(name)(row)));
}

/** @param {any[]} rows @param {string} name @param {boolean} down */
function sorted(rows, name, down) {
  if (!COLUMNS.some(([column]) => column === name)) return rows;
  const order = (/** @type {any} */ a, /** @type {any} */ b) => (a < b ? -1 : a > b ? 1 : 0);
  const made = [...rows].sort((a, b) => (a[name] === null) - (b[name] === null) || (down ? -1 : 1) * order(a[name], b[name]));
  return made;
}

/** @param {any[]} rows @param {URLSearchParams} asked */
function filters(rows, asked) {
  const any = (/** @type {string[]} */ names) => [["", "all"], ...names.map((name) => [name, words(name)])];
  const windows = [...new Set(rows.map((row) => row.window).filter((one) => one !== null))].sort((a, b) => a - b).map(String);
  const pick = (/** @type {string} */ title, /** @type {string} */ name, /** @type {string[]} */ names) =>
    choice(title, name, any(names), asked.get(name) ?? "", (value) => ask({ [name]: value, page: null }));
  return h("form", { class: "controls", role: "search", on: { submit: (/** @type {any} */ event) => event.preventDefault() } },
    pick("State", "state", STATES), pick("Audit", "verdict", ["pass", "fail", "none"]), pick("Split", "split", ["train", "held_out"]), pick("Window", "window", windows),
    h("label", { class: "field" }, h("span", null, "Name"), h("input", { name: "text", value: asked.get("text") ?? "", size: 14, placeholder: "part of it", autocomplete: "off", spellcheck: "false", on: { change: (/** @type {any} */ event) => ask({ text: event.target.value.trim(), page: null }) } })));
}

/** @param {any[]} rows @param {URLSearchParams} asked */
function grid(rows, asked) {
  const sort = asked.get("sort"), down = asked.get("down") === "1";
  const head = COLUMNS.map(([name, text]) => h("th", { scope: "col", "aria-sort": sort === name ? (down ? "descending" : "ascending") : "none" },
    h("button", { type: "button", on: { click: () => ask({ sort: name, down: sort === name && !down ? "1" : null, page: null }) } }, text, sort === name ? (down ? " ↓" : " ↑") : "")));
  return h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table of shards" }, h("table", { class: "shards" },
    h("thead", null, h("tr", null, head)),
    h("tbody", null, rows.map((row) => h("tr", { "data-key": row.name },
      h("th", { scope: "row" }, shardLink(row.name), row.pilot && " (pilot)"),
      [badge(row.state), row.at === "done" ? "–" : words(row.at), row.verdict ? badge(row.verdict) : "–", words(row.split), row.window ?? "–", count(row.rows), count(row.useful), count(row.rejected), short(row.tokens), duration(row.seconds), moment(row.modified)].map((cell) => h("td", null, cell)))))));
}

/** @param {number} rows @param {number} page */
function pager(rows, page) {
  const last = Math.ceil(rows / PAGE) - 1;
  if (last < 1) return null;
  return h("nav", { class: "pager", "aria-label": "Pages of the table" },
    h("button", { type: "button", disabled: page === 0, on: { click: () => ask({ page: page - 1 }) } }, "← before"),
    h("span", null, `${page + 1} of ${last + 1}`),
    h("button", { type: "button", disabled: page === last, on: { click: () => ask({ page: page + 1 }) } }, "next →"));
}
