// Training: loss, accuracy by position, and acceptance by checkpoint and by source.

import { h } from "./dom.js";
import { bar, card, plot, table, waiting } from "./bits.js";
import { count, duration, moment, percent, plural } from "./format.js";
import { label } from "./plots.js";
import { need } from "./source.js";

const LINES = 6;

/** @param {any} app @returns {any[]} */
export function training(app) {
  const found = need("api/training", Math.floor(app.number / 4));
  const data = found.value;
  if (!data) return [h("h1", null, "Training"), waiting(found, "Training")];
  const windows = Object.values(data.windows);
  return [
    h("h1", null, "Training"),
    h("div", { class: "cards" },
      card("Windows trained on", `${count(Object.keys(data.windows).length ? Math.max(...Object.keys(data.windows).map(Number)) + 1 : 0)} of ${count(data.wanted)}`),
      data.live && card("In work", `window ${data.live.window}`, `${count(data.live.done)} of ${count(data.live.total)} steps`, `heard of ${duration(data.live.age + app.elapsed)} ago`),
      data.live?.loss !== null && data.live && card("Loss now", data.live.loss.toFixed(3), data.live.accuracy !== null ? `accuracy ${percent(data.live.accuracy)}` : "")),
    data.live && bar(data.live.done, data.live.total, "Window in work"),
    windows.length ? [h("h2", null, "Loss"), loss(windows), h("h2", null, "Accuracy by position"), positions(windows.at(-1))] : h("p", { class: "dim" }, "No window has been trained on yet."),
    h("h2", null, "Acceptance"), data.evaluations.length ? acceptance(data.evaluations) : h("p", { class: "dim" }, "Nothing has been measured yet."),
  ];
}

/** @param {any[]} windows */
function loss(windows) {
  const points = windows.flatMap((one) => one.curve.map((point) => [one.steps_before + point.step, point.loss]));
  const ends = windows.flatMap((one) => one.epochs.filter((epoch) => epoch.held_out).map((epoch) => [one.steps_before + epoch.step, epoch.held_out.loss]));
  const traces = [
    { x: points.map(([step]) => step), y: points.map(([, value]) => value), mode: "lines", name: "train", line: { color: "--accent" } },
    { x: ends.map(([step]) => step), y: ends.map(([, value]) => value), mode: "lines+markers", name: "held out", line: { color: "--warm", dash: "dot" } },
  ];
  const values = points.map(([, value]) => value);
  const steep = Math.max(...values) > 4 * Math.min(...values) && Math.min(...values) > 0;
  const shapes = windows.slice(1).map((one) => ({ type: "line", yref: "paper", y0: 0, y1: 1, x0: one.steps_before + 0.5, x1: one.steps_before + 0.5, line: { color: "--line", dash: "dash", width: 1 } }));
  const last = points.at(-1);
  return plot("plot-train", `Loss by step, ${last ? last[1].toFixed(3) : "none"} at last`, { traces, layout: { xaxis: { title: { text: "step" } }, yaxis: { title: { text: "loss" }, type: steep ? "log" : "linear", rangemode: "normal" }, shapes } });
}

/** @param {any} window */
function positions(window) {
  const epochs = window.epochs.filter((epoch) => epoch.held_out);
  const chosen = epochs.slice(-LINES);
  const traces = chosen.map((epoch, k) => {
    const last = k === chosen.length - 1;
    const shares = epoch.held_out.accuracy_by_position;
    return { x: shares.map((_, slot) => slot + 1), y: shares, mode: "lines+markers", name: `held out, epoch ${epoch.epoch}`, line: { color: last ? "--accent" : "--muted", width: last ? 2.5 : 1.5, dash: last ? "solid" : "dot" } };
  });
  const final = window.epochs.at(-1);
  if (final) traces.push({ x: final.train.accuracy_by_position.map((_, slot) => slot + 1), y: final.train.accuracy_by_position, mode: "lines+markers", name: `train, epoch ${final.epoch}`, line: { color: "--warm", width: 1.5, dash: "solid" } });
  return [h("p", { class: "dim" }, "Of the last window. Position 1 is the first token that is proposed."),
    plot("plot-positions", "Accuracy by position", { traces, layout: { xaxis: { title: { text: "position in the block" }, dtick: traces[0]?.x.length <= 16 ? 1 : null }, yaxis: { tickformat: ".0%" } } })];
}

/** @param {any[]} evaluations */
function acceptance(evaluations) {
  const names = evaluations.map((one) => `${one.fingerprint}${one.current ? " (this build)" : ""}`);
  const of = (/** @type {string} */ decoder) => evaluations.map((one) => one.evaluation[decoder].acceptance_length);
  const traces = [["drafter", "--accent"], ["prompt_lookup", "--warm"]].map(([decoder, colour], k) => {
    const lengths = of(decoder);
    return { x: lengths.map((one) => one.mean), y: names.map((_, place) => place + (k ? -0.12 : 0.12)), mode: "markers", name: decoder.replace("_", " "), marker: { color: colour, size: 9 }, error_x: { type: "data", symmetric: false, array: lengths.map((one) => one.high - one.mean), arrayminus: lengths.map((one) => one.mean - one.low), color: colour }, hovertemplate: "%{x:.2f}<extra></extra>" };
  });
  const layout = { height: 110 + 40 * names.length, xaxis: { title: { text: "tokens a forward of the target" }, rangemode: "normal" }, yaxis: { tickvals: names.map((_, k) => k), ticktext: names.map((name) => label(name)), range: [-0.6, names.length - 0.4], rangemode: "normal" } };
  const head = ["checkpoint", "measured", "drafter", "prompt lookup", "prompts", "same text"];
  const rows = evaluations.map((one, k) => [names[k], moment(one.at), interval(one.evaluation.drafter.acceptance_length), interval(one.evaluation.prompt_lookup.acceptance_length), count(one.evaluation.prompts), `${count(one.evaluation.identical)} of ${count(one.evaluation.prompts)}`]);
  const last = evaluations.find((one) => one.current) ?? evaluations.at(-1);
  return [plot("plot-acceptance", "Acceptance length by checkpoint", { traces, layout }), table(head, rows, { label: "Acceptance by checkpoint" }), h("h3", null, "By source"), bySource(last)];
}

/** @param {any} one */
function interval(one) {
  return `${one.mean.toFixed(2)} (${one.low.toFixed(2)} to ${one.high.toFixed(2)})`;
}

/** @param {any} measured */
function bySource(measured) {
  const { drafter, prompt_lookup: lookup } = measured.evaluation;
  const names = [...new Set([...Object.keys(drafter.by_source), ...Object.keys(lookup.by_source)])].sort();
  const cell = (/** @type {any} */ one) => (one ? `${interval(one.acceptance_length)}, ${percent(one.saved_share.mean)} saved` : "–");
  return [h("p", { class: "dim" }, `Checkpoint ${measured.fingerprint}, ${plural(measured.evaluation.prompts, "prompt")}.`),
    table(["source", "drafter", "prompt lookup"], names.map((name) => [name, cell(drafter.by_source[name]), cell(lookup.by_source[name])]), { label: "Acceptance by source" })];
}
