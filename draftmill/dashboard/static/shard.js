// One shard: its chain from prompts to hidden states, why it was built, what its objects and its logs say.

import { h } from "./dom.js";
import { badge, card, table, waiting } from "./bits.js";
import { count, duration, moment, size, words } from "./format.js";
import { address } from "./place.js";
import { embedded, known, need } from "./source.js";

/** @param {any} app @param {string} name @returns {any[]} */
export function shard(app, name) {
  const path = `api/shard/${encodeURIComponent(name)}`;
  // Of a shard that is done nothing changes but with its objects.
  const found = need(path, known(path)?.state === "done" ? app.revision : `${app.revision} ${Math.floor(app.number / 8)}`);
  const one = found.value;
  const back = h("p", null, h("a", { href: address("shards") }, "← all shards"));
  if (!one) return [back, h("h1", null, `Shard ${name}`), waiting(found, "This shard")];
  return [
    back,
    h("h1", null, "Shard ", h("span", { class: "mono" }, one.name), " ", badge(one.state)),
    h("div", { class: "cards" },
      card("Rows", count(one.rows), `${count(one.useful)} useful, ${count(one.rejected)} rejected`),
      card("Tokens", count(one.tokens)),
      card("Split", one.window === null ? "held out" : `window ${one.window}`, one.pilot ? "the pilot" : ""),
      card("Audit", one.verdict ?? "none yet")),
    h("p", null, one.why),
    !embedded() && h("p", null, h("a", { href: address("samples", { shard: one.name }) }, "Read its rows")),
    h("ol", { class: "chain" }, one.chain.map(link)),
  ];
}

/** @param {any} one */
function link(one) {
  const facts = [
    ["object", h("span", { class: "mono" }, one.key)], ["fingerprint", h("span", { class: "mono" }, one.fingerprint)],
    ["size", size(one.bytes)], ["changed", moment(one.modified)], ["took", duration(one.seconds)],
    ["host", one.host || "–"], ["GPUs", one.gpus.join(", ") || "–"], ["run", one.run || "–"], ["git", one.git || "–"],
    ["log", h("code", null, `tail -n 40 ${one.log}`)],
  ];
  return h("li", { "data-key": one.stage },
    h("h2", null, words(one.stage), " ", badge(one.state)),
    table([words(one.stage), "its object"], facts, { class: "texts", label: `${words(one.stage)}: its object` }),
    one.before.length > 0 && h("p", null, `Objects of other settings, newest first: ${one.before.join(", ")}.`),
    one.changed?.length > 0 && table(["setting", "before", "now"], one.changed.map((row) => [row.name, row.before, row.after]), { label: `Settings that changed for ${one.stage}` }),
    folded("Record of the job", one.record), folded("What it was made of", one.made_of),
    one.log_end && h("details", null, h("summary", null, "End of the log"), h("pre", { tabindex: 0 }, one.log_end)));
}

/** @param {string} title @param {any} value */
function folded(title, value) {
  return value && h("details", null, h("summary", null, title), h("pre", { tabindex: 0 }, JSON.stringify(value, null, 1)));
}
