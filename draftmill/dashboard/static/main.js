// The page: which view is shown, when it is drawn anew, and what is said above it.

import { h } from "./dom.js";
import { clock, duration } from "./format.js";
import { lanes } from "./lanes.js";
import { morph } from "./morph.js";
import { overview } from "./overview.js";
import { address, place } from "./place.js";
import { draw } from "./plots.js";
import { quality } from "./quality.js";
import { samples } from "./samples.js";
import { shards } from "./shards.js";
import { embedded, follow, onArrival } from "./source.js";
import { apply, chosen, cycle } from "./theme.js";
import { training } from "./training.js";

const VIEWS = { overview: ["Overview", overview], quality: ["Data quality", quality], samples: ["Samples", samples], lanes: ["Lanes", lanes], training: ["Training", training], shards: ["Shards", shards] };
const OLD_S = 30;

/** What views draw from: the last message of the server, and seconds since it came. */
const app = { state: null, number: 0, revision: 0, elapsed: 0, problem: null, connected: true, came: 0, ahead: 0 };
let planned = false;

/** Draw soon, once for all that happens until then. */
function redraw() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => { planned = false; render(); });
}

function render() {
  app.elapsed = app.state && !embedded() ? Math.max(0, (performance.now() - app.came) / 1000) : 0;
  const asked = place().view;
  const view = Object.hasOwn(VIEWS, asked) ? asked : "overview";
  const [title, shown] = VIEWS[view];
  document.title = `${title} · draftmill`;
  put("top", head(view));
  put("banner", banner());
  put("main", app.state ? shown(app) : [h("h1", null, "draftmill"), h("p", { class: "dim" }, "Reading the store …")]);
}

/** @param {string} id @param {any} children */
function put(id, children) {
  morph(/** @type {Element} */ (document.getElementById(id)), h("div", null, children), draw);
}

/** @param {string} view */
function head(view) {
  const asOf = app.state ? `${embedded() ? "written" : "as of"} ${embedded() ? new Date(app.state.now * 1000).toLocaleString() : clock(app.state.now)}` : "";
  return [
    h("div", { class: "brand" }, h("strong", null, "draftmill"), h("bdi", { class: "store dim" }, app.state?.store ?? "")),
    h("nav", { "aria-label": "Views" }, Object.entries(VIEWS).map(([name, [title]]) => h("a", { href: address(name), "aria-current": name === view ? "page" : null }, title))),
    h("div", { class: "tools" }, h("span", { class: "dim" }, asOf), h("button", { type: "button", on: { click: () => { cycle(); redraw(); } }, "aria-label": `Theme: ${chosen()}` }, `◐ ${chosen()}`)),
  ];
}

/** What a person must know before trusting the numbers. */
function banner() {
  if (!app.connected) return h("div", { class: "banner", role: "alert" }, "There is no connection to the dashboard; trying again.");
  if (app.problem) {
    const ago = duration(app.at - app.problem.since + app.elapsed);
    return h("div", { class: "banner", role: "alert" }, `The store cannot be read since ${clock(app.problem.since)}`, h("span", { "aria-hidden": "true" }, ` (${ago})`), `: ${app.problem.message}`, app.state ? " What is shown is what was read before." : "");
  }
  if (app.state && !embedded() && app.elapsed > OLD_S) return h("div", { class: "banner", role: "alert" }, "Nothing new has come for a while.");
  return null;
}

/** @param {any} message */
function told(message) {
  Object.assign(app, { number: message.number, revision: message.revision, problem: message.problem, at: message.at, connected: true });
  if (message.state) {
    app.state = message.state;
    // Ages are of the time when the store was looked at.
    app.came = performance.now() - Math.max(0, message.at - message.state.now) * 1000;
  }
  redraw();
}

apply();
document.getElementById("skip")?.addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main")?.focus();
});
addEventListener("hashchange", () => redraw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
onArrival(redraw);
const inside = embedded();
if (inside) told(inside["api/state"]);
else {
  render();
  follow(told, (connected) => { app.connected = connected; redraw(); });
  setInterval(redraw, 1000);
}
