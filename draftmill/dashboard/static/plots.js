// Plots by plotly, which is loaded when the first one is to be drawn. Colours are named as in the style sheet.

import { visible } from "./dom.js";
import { colour } from "./theme.js";

/** @type {Promise<any> | null} */
let loading = null;

/** @returns {Promise<any>} */
function library() {
  if ("Plotly" in window) return Promise.resolve(window.Plotly);
  loading ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = "plotly.js";
    script.onload = () => done(window.Plotly);
    script.onerror = () => { loading = null; failed(new Error("plotly.js")); };
    document.head.appendChild(script);
  });
  return loading;
}

/** @param {unknown} text @returns {string} a label from outside; plotly would read a little HTML in it */
export function label(text) {
  return visible(text).slice(0, 80).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

/**
 * Draw an element's figure, unless it is drawn already. Colours such as "--accent" become those of the theme.
 * @param {any} element
 */
export async function draw(element) {
  const made = `${document.documentElement.dataset.theme ?? ""} ${dark()} ${JSON.stringify(element.figure)}`;
  if (element.drawn === made) return;
  element.drawn = made;
  try {
    const plotly = await library();
    if (!element.isConnected || element.drawn !== made) return;
    const { traces, layout } = painted(element.figure);
    await plotly.react(element, traces, full(layout), { responsive: true, displayModeBar: false, displaylogo: false });
  } catch {
    element.drawn = null;
  }
}

/** @returns {boolean} */
function dark() {
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

/** @param {any} value @returns {any} */
function painted(value) {
  if (typeof value === "string") return value.startsWith("--") ? colour(value.slice(2)) : value;
  if (Array.isArray(value)) return value.map(painted);
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, painted(part)]));
}

/** @param {any} layout @returns {any} */
function full(layout) {
  const axis = { gridcolor: colour("line"), zerolinecolor: colour("line"), linecolor: colour("line"), automargin: true, fixedrange: true };
  return {
    height: 280,
    margin: { l: 8, r: 8, t: 12, b: 8 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("text"), size: 12, family: "system-ui, sans-serif" },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    hovermode: "closest",
    ...layout,
    xaxis: { ...axis, ...layout.xaxis },
    yaxis: { ...axis, rangemode: "tozero", ...layout.yaxis },
  };
}

/** @param {number} at seconds since 1970 @returns {string} local time as plotly reads it */
export function instant(at) {
  const time = new Date(at * 1000);
  return new Date(time.getTime() - time.getTimezoneOffset() * 60000).toISOString().slice(0, 19).replace("T", " ");
}
