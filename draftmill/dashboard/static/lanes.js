// Lanes: what each GPU did over time, which server answered on it, what the gate said, and the memory it took.

import { h } from "./dom.js";
import { badge, choice, plot, table, waiting } from "./bits.js";
import { clock, count, duration, moment, percent, plural, size, words } from "./format.js";
import { instant } from "./plots.js";
import { ask, place } from "./place.js";
import { embedded, need } from "./source.js";

const SPANS = [["1", "last hour"], ["6", "6 hours"], ["24", "day"], ["168", "week"]];
const CHANGES = 8;
const LISTED = 60;

/** @param {any} app @returns {any[]} */
export function lanes(app) {
  const hours = embedded() ? "24" : place().asked.get("hours") ?? "1";
  const found = need(`api/lanes?hours=${hours}`, Math.floor(app.number / 4));
  const stages = ["generate", "audit", "extract", "train", "evaluate"];
  return [
    h("h1", null, "Lanes"),
    !embedded() && h("div", { class: "controls" }, choice("Time", "hours", SPANS, hours, (value) => ask({ hours: value }))),
    h("p", { class: "legend dim" }, stages.map((name) => h("span", { class: `stage-${name}` }, name)), h("span", { class: "server" }, "server")),
    found.value ? timelines(app, found.value) : waiting(found, "Lanes"),
  ];
}

/** @param {any} app @param {any} data */
function timelines(app, data) {
  if (!data.lanes.length) return h("p", { class: "dim" }, "No lane was heard of in this time.");
  const now = new Map(app.state.lanes.map((lane) => [lane.id, lane]));
  return [data.lanes.map((lane) => timeline(data, lane, now.get(lane.id), data.history?.[lane.id], app)),
    data.left_out > 0 && h("p", { class: "dim" }, `${plural(data.left_out, "older process")} of jobs without a GPU ${data.left_out === 1 ? "is" : "are"} not shown.`)];
}

/** @param {any} data @param {any} lane @param {any} state @param {any} history @param {any} app */
function timeline(data, lane, state, history, app) {
  const whole = data.now - data.since;
  const at = (/** @type {number} */ time) => `${Math.max(0, Math.min(1, (time - data.since) / whole)) * 100}%`;
  const wide = (/** @type {any} */ one) => ({ left: at(one.start), width: `calc(max(2px, ${Math.max(0, one.end - Math.max(one.start, data.since)) / whole * 100}%))` });
  const name = lane.gpu ?? lane.id;
  const summary = `${name} on ${lane.host}: ${plural(lane.spans.reduce((sum, one) => sum + one.jobs, 0), "job")}, ${percent(Math.min(lane.busy / whole, 1))} of the time at work`;
  return h("section", { class: "lane", "data-key": lane.id, "aria-label": name },
    h("h2", null, h("span", { class: "mono" }, name), h("span", { class: "dim" }, ` ${lane.host}`), state && [" ", badge(state.state)]),
    h("div", { class: "track", role: "img", "aria-label": summary },
      lane.spans.map((one) => h("div", { class: `span stage-${one.stage} is-${one.state}`, style: wide(one), title: `${words(one.stage)} ${one.subject}${one.jobs > 1 ? ` and ${one.jobs - 1} more` : ""}: ${clock(one.start)} to ${clock(one.end)}, ${duration(one.end - one.start)}, ${one.state}` })),
      lane.servers.map((one) => h("div", { class: "span server", style: wide(one), title: `server ${one.url}, ${one.state}, life ${one.epoch}: ${clock(one.start)} to ${clock(one.end)}` })),
      lane.gates.map((one) => h("div", { class: `gate is-${one.verdict}`, style: { left: at(one.at) }, title: `gate: ${one.verdict} ${one.reasons.join(", ")}, ${clock(one.at)}` }))),
    h("div", { class: "axis dim" }, h("span", null, moment(data.since)), h("span", null, clock(data.now))),
    h("p", { class: "dim" }, `${percent(Math.min(lane.busy / whole, 1))} of the time at work. `, state && now(state, app)),
    history && memory(lane, history),
    spans(lane), events(lane, history));
}

/** @param {any} state @param {any} app */
function now(state, app) {
  return [`${words(state.stage)} ${state.subject} ${count(state.done)} of ${count(state.total)} ${state.unit}, heard of ${duration(state.age + app.elapsed)} ago`,
    state.memory_bytes !== null && `, its process holds ${size(state.memory_bytes)} on the host`,
    state.server && `, server ${state.server.state ?? "unknown"}, life ${state.server.epoch ?? "–"}`, "."];
}

/** @param {any} lane @param {any} history */
function memory(lane, history) {
  if (history.memory.length < 3) return null;
  const trace = { x: history.memory.map(([at]) => instant(at)), y: history.memory.map(([, bytes]) => bytes / 1e9), mode: "lines", line: { color: "--accent", width: 1.5 }, hovertemplate: "%{y:.1f} GB<extra></extra>" };
  return [h("h3", null, "Memory of its process on the host, GB"), plot(`plot-memory-${lane.id}`, `Memory of ${lane.id} on its host`, { traces: [trace], layout: { height: 130, yaxis: { nticks: 3 }, xaxis: { nticks: 4 } } })];
}

/** @param {any} lane what the timeline shows, for those who have no pointer or cannot see it */
function spans(lane) {
  const rows = [
    ...lane.spans.map((one) => [one.start, words(one.stage), badge(one.state === "idle" ? "done" : one.state), `${one.subject || "–"}${one.jobs > 1 ? ` and ${one.jobs - 1} more` : ""}`, duration(one.end - one.start)]),
    ...lane.servers.map((one) => [one.start, "server", badge(one.state), `${one.url}, life ${one.epoch ?? "–"}`, duration(one.end - one.start)]),
  ].sort(([a], [b]) => b - a);
  const shown = rows.slice(0, LISTED).map(([start, ...rest]) => [moment(start), ...rest]);
  const title = rows.length > shown.length ? `Spans (the newest ${shown.length} of ${count(rows.length)})` : `Spans (${shown.length})`;
  return h("details", { "data-key": "spans" }, h("summary", null, title), table(["began", "what", "state", "of", "took"], shown, { label: `Spans of ${lane.id}` }));
}

/** @param {any} lane @param {any} history */
function events(lane, history) {
  const told = lane.gates.map((one) => [moment(one.at), "gate", badge(one.verdict), one.reasons.join(", ") || "–"]);
  const seen = (history?.changes ?? []).map((one) => [moment(one.at), "lane", badge(one.state), [one.verdict && `gate ${one.verdict}`, one.server && `server ${one.server}, life ${one.epoch}`].filter(Boolean).join(", ") || "–"]);
  const rows = [...told, ...seen].slice(-CHANGES);
  if (!rows.length) return null;
  return h("details", { "data-key": "changes" }, h("summary", null, `Verdicts and changes (${rows.length})`), table(["when", "what", "state", "more"], rows, { label: `Changes of ${lane.id}` }));
}
