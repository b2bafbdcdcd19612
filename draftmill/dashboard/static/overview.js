// The overview: what is done, what it takes, what goes wrong.

import { h } from "./dom.js";
import { bar, badge, card, shardLink, table } from "./bits.js";
import { clock, count, duration, eta, moment, plural, short, words } from "./format.js";
import { address } from "./place.js";

/** @param {any} app @returns {any[]} */
export function overview(app) {
  const state = app.state;
  return [
    h("h1", null, state.finished ? "Finished" : "Overview"),
    cards(state),
    h("h2", null, "Pipeline"),
    h("ol", { class: "pipeline" }, state.stages.map((stage) => step(stage))),
    failures(state),
    h("h2", null, "Lanes"),
    lanes(app),
    notes(state),
  ];
}

/** @param {any} state */
function cards(state) {
  const generate = state.stages.find((stage) => stage.name === "generate");
  const { rows, token_rate: tokens, trained_rate: trained } = generate;
  return h("div", { class: "cards" },
    card("Time left", state.eta.low === null ? "unknown" : eta(state.eta), state.eta.low === null && state.eta.reason, state.eta.leaves_out.length && state.eta.low !== null ? `without ${state.eta.leaves_out.map(words).join(", ")}, not measured yet` : ""),
    card("Useful rows", short(rows.useful), `of ${short(rows.wanted)}; ${count(rows.rejected)} rejected`),
    card("Tokens a second", short(tokens.minute), `${short(trained.minute)} of them trained on`, `last hour ${short(tokens.hour)}`),
    cost(state.cost),
    card("Not yet in the store", plural(state.lag.jobs, "job"), state.lag.oldest !== null ? `the oldest for ${duration(state.lag.oldest)}` : "nothing waits"),
    card("Failures", count(state.failure_count), state.failure_count ? "see below" : "none"));
}

/** @param {any} cost */
function cost(cost) {
  const hours = cost.expected_low === null ? "" : `of ${short(cost.expected_low)} to ${short(cost.expected_high)} expected`;
  const price = cost.spent === null ? "" : `costs ${cost.spent.toFixed(2)} so far${cost.total_low === null ? "" : `, ${cost.total_low.toFixed(2)} to ${cost.total_high.toFixed(2)} in all`}`;
  return card("GPU-hours", cost.gpu_hours >= 10 ? count(Math.round(cost.gpu_hours)) : cost.gpu_hours.toFixed(2), hours, price);
}

/** @param {any} stage */
function step(stage) {
  const { jobs, rows } = stage;
  const whole = rows.wanted ? [rows.done, rows.wanted] : [jobs.done, jobs.wanted];
  const parts = ["running", "stale", "failed", "interrupted"].filter((name) => jobs[name]);
  return h("li", { "data-key": stage.name, class: jobs.wanted && jobs.done === jobs.wanted ? "is-whole" : "" },
    h("strong", null, words(stage.name)),
    h("span", { class: "figure" }, count(jobs.done), jobs.wanted !== null && h("span", { class: "dim" }, ` of ${count(jobs.wanted)}`)),
    bar(whole[0], whole[1], words(stage.name)),
    parts.length > 0 && h("div", { class: "states" }, parts.map((name) => h("span", null, badge(name), ` ${count(jobs[name])}`))),
    rows.wanted !== null && h("div", { class: "dim" }, `${short(rows.done)} of ${short(rows.wanted)} ${stage.unit}`, rows.rejected ? `, ${short(rows.rejected)} rejected` : ""),
    stage.token_rate.minute > 0 && h("div", { class: "dim" }, `${short(stage.token_rate.minute)} tokens/s`),
    stage.eta.high !== 0 && jobs.done !== jobs.wanted && h("div", { class: "dim" }, eta(stage.eta)));
}

/** @param {any} state */
function failures(state) {
  if (!state.failures.length) return null;
  return h("section", { "aria-label": "Failures" }, h("h2", null, "Failures"),
    h("ul", { class: "failures" }, state.failures.map((one) => h("li", { "data-key": `${one.stage} ${one.name}` },
      h("div", null, badge("failed"), ` ${words(one.stage)} `, one.subject && shardName(one), ` on ${one.host || "an unknown host"}, ${moment(one.at)}`, one.running_again && " (runs again)"),
      h("p", { class: "message" }, one.message || "It said nothing."),
      h("code", null, one.command)))),
    state.failure_count > state.failures.length && h("p", null, h("a", { href: address("shards", { state: "failed" }) }, `The newest ${count(state.failures.length)} of ${count(state.failure_count)}`)));
}

/** @param {any} failure */
function shardName(failure) {
  return /^[0-9a-f]{12}$/.test(failure.subject) ? shardLink(failure.subject) : failure.subject;
}

/** @param {any} app */
function lanes(app) {
  const shown = app.state.lanes;
  if (!shown.length) return h("p", { class: "dim" }, "Nothing is at work.");
  const rows = shown.map((lane) => [
    h("span", { class: "mono" }, lane.gpu ? lane.gpu.slice(0, 12) : `pid ${lane.pid}`),
    lane.host, badge(lane.state), words(lane.stage), lane.subject || "–", `${count(lane.done)} of ${count(lane.total)}`,
    short(lane.tokens_per_second), duration(lane.age + app.elapsed), lane.gate ? badge(lane.gate.verdict) : "–",
  ]);
  return [table(["lane", "host", "state", "stage", "subject", "done", "tokens/s", "heard of", "gate"], rows, { label: "Lanes" }),
    h("p", null, h("a", { href: address("lanes") }, "What the lanes did over time"))];
}

/** @param {any} state */
function notes(state) {
  const plan = state.plan;
  return [
    state.notes.length > 0 && [h("h2", null, "Notes"), h("ul", null, state.notes.map((note) => h("li", null, note)))],
    h("p", { class: "dim" }, plan.target ? `Target ${plan.target}, ${plural(plan.shards, "shard")} (${count(plan.held_out)} held out), ${count(plan.prompts)} prompts; ` : "",
      plan.started ? `build ${plan.run} started ${moment(plan.started)}; ` : "", `as of ${clock(state.now)}.`),
  ];
}
