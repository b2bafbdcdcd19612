// Data quality: how long the answers are, the spike by name, and shares by source and over time with their limits.

import { h } from "./dom.js";
import { card, choice, plot, shardLink, table, waiting } from "./bits.js";
import { count, percent, plural, words } from "./format.js";
import { instant, label } from "./plots.js";
import { address, ask, place } from "./place.js";
import { need } from "./source.js";

const BINS = 60;
const LIMITS = { spike: "max_spike", short: "max_short", empty: "max_empty", repetitive: "max_repetitive", duplicates: "max_duplicates", cut: "max_cut", rejected: "max_rejected" };
const SHOWN_FAILED = 12;

/** @param {any} app @returns {any[]} */
export function quality(app) {
  const found = need("api/quality", app.revision);
  const data = found.value;
  if (!data?.overall.rows) return [h("h1", null, "Data quality"), waiting(found, "Audits")];
  const lengths = need("api/lengths", Math.floor(app.revision / 20));
  const source = place().asked.get("source") ?? "";
  const counts = Object.hasOwn(data.by_source, source) ? data.by_source[source] : data.overall;
  const of = counts === data.overall ? "" : ` of ${source}`;
  return [
    h("h1", null, "Data quality"),
    verdict(data),
    h("div", { class: "controls" }, choice("Source", "source", [["", "all"], ...Object.keys(data.by_source).map((name) => [name, name])], source, (value) => ask({ source: value }))),
    h("h2", null, "Loss tokens an answer", of), lossTokens(data, counts),
    h("h2", null, "Finish reasons and rejections", of), tallies(counts),
    h("h2", null, "Completion length", of), completionLength(lengths, of && source),
    h("h2", null, "By source"), bySource(data),
    h("h2", null, "Over time"),
    h("p", { class: "dim" }, "Each point is one audit, or neighbouring audits weighed by their answers. The dashed line is the limit."),
    h("div", { class: "plots" }, Object.keys(LIMITS).map((code) => overTime(data, code))),
  ];
}

/** @param {any} data */
function verdict(data) {
  const over = data.checks.filter((one) => one.over);
  const [value, rows] = data.overall.spike;
  return [
    h("div", { class: "cards" },
      card("Answers audited", count(data.overall.rows), `in ${plural(data.shards, "shard")}`),
      card("Loss tokens an answer", count(data.overall.mean), `${count(data.overall.loss_tokens)} in all`),
      card("Most common number", `${count(value)} tokens`, `${percent(rows / data.overall.rows)} of the answers`),
      card("Shards over a limit", count(data.failed.length))),
    over.map((one) => h("p", { class: "note is-bad" }, `✕ Over the whole, ${words(one.code)} is ${measured(one)}; the limit is ${bound(one)}.`)),
    data.failed.length > 0 && h("p", { class: "note" }, "✕ Shards over a limit: ",
      data.failed.slice(0, SHOWN_FAILED).map((name) => [shardLink(name), " "]),
      data.failed.length > SHOWN_FAILED && h("a", { href: address("shards", { verdict: "fail" }) }, `and ${data.failed.length - SHOWN_FAILED} more`)),
  ];
}

/** @param {any} one */
function measured(one) {
  return one.code === "mean_loss_tokens" ? one.measured.toFixed(1) : percent(one.measured);
}

/** @param {any} one */
function bound(one) {
  return one.code === "mean_loss_tokens" ? `at least ${one.limit}` : `at most ${percent(one.limit)}`;
}

/**
 * Tallies by value as bars of equal width: their middles, names, and heights for each tally.
 * @param {Object<string, number>[]} tallies
 */
function bins(tallies) {
  const values = tallies.flatMap((tally) => Object.entries(tally).map(([value, rows]) => [Number(value), rows])).sort(([a], [b]) => a - b);
  const low = values[0][0], most = values.at(-1)[0];
  const high = nearly(values, most);
  const step = Math.max(1, Math.ceil((high - low + 1) / BINS));
  const number = Math.ceil((high - low + 1) / step);
  const heights = tallies.map((tally) => {
    const each = new Array(number).fill(0);
    for (const [value, rows] of Object.entries(tally)) if (Number(value) <= high) each[Math.floor((Number(value) - low) / step)] += rows;
    return each;
  });
  const beyond = values.reduce((sum, [value, rows]) => sum + (value > high ? rows : 0), 0);
  const first = Array.from({ length: number }, (_, k) => low + k * step);
  return { low, x: first.map((one) => one + (step - 1) / 2), names: first.map((one) => (step === 1 ? `${one}` : `${one} to ${one + step - 1}`)), heights, step, rest: beyond ? ` Beyond the plot: ${plural(beyond, "answer")} of more than ${count(high)}, up to ${count(most)}.` : "" };
}

/**
 * The largest value, or a smaller one that all but one in two hundred reach where the rest would flatten the plot.
 * @param {number[][]} values value and rows, ascending
 * @param {number} most
 */
function nearly(values, most) {
  const rows = values.reduce((sum, [, each]) => sum + each, 0);
  let left = rows / 200;
  for (const [value, each] of [...values].reverse()) {
    left -= each;
    if (left < 0) return most > 3 * value ? value : most;
  }
  return most;
}

/** @param {any} data @param {any} counts those of all answers or of a source's */
function lossTokens(data, counts) {
  const { histogram, histogram_cut: cut, spike, rows } = counts;
  if (!rows) return h("p", { class: "dim" }, "It has no answer.");
  const made = bins([histogram, cut]);
  const [value, most] = spike;
  const share = most / rows;
  const limit = data.limits.max_spike * rows;
  const top = Math.max(...made.heights[0].map((one, k) => one + made.heights[1][k]), most);
  const sentence = `The most common exact number of loss tokens is ${value}: ${plural(most, "answer")}, ${percent(share)} of them; the limit is ${percent(data.limits.max_spike)}.`;
  const bin = Math.min(Math.max(Math.floor((value - made.low) / made.step), 0), made.x.length - 1);
  const above = Math.max(most, made.heights[0][bin] + made.heights[1][bin]);
  const hover = "%{customdata} loss tokens: %{y}<extra>%{fullData.name}</extra>";
  const bars = [["ended by itself", "--accent"], ["cut off by length", "--muted"]].map(([name, colour], k) => (
    { type: "bar", name, x: made.x, y: made.heights[k], customdata: made.names, hovertemplate: hover, marker: { color: colour }, width: made.step * 0.92 }));
  const line = { type: "bar", name: `exactly ${value}`, x: [value], y: [most], width: made.step * 0.34, marker: { color: "--warm" }, hovertemplate: `exactly ${value}: %{y}<extra></extra>`, offset: -made.step * 0.17 };
  const layout = {
    barmode: "stack", height: 320, xaxis: { title: { text: "loss tokens" } }, yaxis: { title: { text: "answers" } },
    annotations: [{ x: value, y: above, text: `exactly ${value}: ${percent(share)}`, showarrow: true, arrowhead: 0, ay: -26, ax: 40, font: { color: "--text" } }],
    shapes: limit <= top * 1.15 ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: limit, y1: limit, line: { color: "--bad", dash: "dash", width: 1.5 } }] : [],
  };
  return [h("p", null, sentence, limit > top * 1.15 ? " It lies above the plot." : " The dashed line is the limit for one exact number.", made.rest),
    plot("plot-loss", sentence, { traces: [...bars, { ...line, base: 0 }], layout })];
}

/** @param {import("./source.js").Held} found @param {string} source one, or nothing for all */
function completionLength(found, source) {
  if (!found.value?.read) return waiting(found, "Completions");
  const { by_source: each, read, shards } = found.value;
  const chosen = Object.entries(each).filter(([name]) => !source || name === source).map(([, counts]) => counts);
  if (!chosen.length) return h("p", { class: "dim" }, `None of it is in the ${plural(read, "shard")} that were read.`);
  const made = bins([summed(chosen)]);
  const text = `Output tokens of the answers, thinking and special tokens included, from ${read} of ${plural(shards, "shard")}.`;
  const trace = { type: "bar", x: made.x, y: made.heights[0], customdata: made.names, hovertemplate: "%{customdata} tokens: %{y}<extra></extra>", marker: { color: "--accent" } };
  return [h("p", { class: "dim" }, text, made.rest), plot("plot-length", text, { traces: [trace], layout: { bargap: 0.08, height: 240, xaxis: { title: { text: "output tokens" } }, yaxis: { title: { text: "answers" } } } })];
}

/** @param {Object<string, number>[]} tallies @returns {Object<string, number>} one that holds all of them */
function summed(tallies) {
  const whole = {};
  for (const tally of tallies) for (const [value, rows] of Object.entries(tally)) whole[value] = (whole[value] ?? 0) + rows;
  return whole;
}

/** @param {any} data */
function bySource(data) {
  const codes = Object.keys(LIMITS);
  const rows = Object.entries(data.by_source).map(([source, counts]) => {
    const checks = Object.fromEntries(data.checks_by_source[source].map((one) => [one.code, one]));
    return [h("a", { href: address("samples", { source }) }, source), count(counts.rows), counts.mean.toFixed(1),
      ...codes.map((code) => (checks[code].over ? h("b", { class: "bad" }, `✕ ${percent(checks[code].measured)}`) : percent(checks[code].measured)))];
  });
  rows.push(["limit", "", data.limits.min_mean_loss_tokens, ...codes.map((code) => percent(data.limits[LIMITS[code]]))]);
  return table(["source", "answers", "mean", ...codes.map(words)], rows, { label: "Shares by source" });
}

/** @param {any} data @param {string} code */
function overTime(data, code) {
  const limit = data.limits[LIMITS[code]];
  const points = data.points;
  const last = points.at(-1);
  const x = points.map((point) => instant(point.at));
  const y = points.map((point) => point[code]);
  const failed = points.map((point, k) => (point.failed.length ? k : -1)).filter((k) => k >= 0);
  const traces = [
    { x, y, mode: points.length > 40 ? "lines" : "lines+markers", line: { color: "--accent", width: 1.5 }, name: words(code), customdata: points.map((point) => `${plural(point.shards, "shard")}, ${count(point.rows)} answers`), hovertemplate: "%{y:.1%}, %{customdata}<extra></extra>" },
    { x: failed.map((k) => x[k]), y: failed.map((k) => y[k]), mode: "markers", name: "over a limit", marker: { color: "--bad", symbol: "x", size: 7 }, text: failed.map((k) => label(points[k].failed.join(", "))), hovertemplate: "%{text}<extra></extra>" },
  ];
  const near = limit <= Math.max(...y, 0.01) * 3;
  const layout = {
    height: 170, showlegend: false, yaxis: { tickformat: ".0%", nticks: 4 }, xaxis: { nticks: 4 },
    shapes: near ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: limit, y1: limit, line: { color: "--bad", dash: "dash", width: 1.5 } }] : [],
  };
  const text = `${words(code)} over time: ${percent(last[code])} at last, limit ${percent(limit)}`;
  return h("div", null, h("h3", null, words(code), h("span", { class: "dim" }, ` limit ${percent(limit)}${near ? "" : ", above the plot"}`)), plot(`plot-time-${code}`, text, { traces, layout }));
}

/** @param {any} counts */
function tallies(counts) {
  const groups = [["Finish reason", counts.finish], ["Thinking", counts.thinking], ["Rejected", counts.rejected]];
  return h("div", { class: "tallies" }, groups.map(([title, group]) =>
    table([title, "rows"], Object.entries(group).map(([name, rows]) => [words(name), count(rows)]), { label: title })));
}
