
"use strict";
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const figures = read("figures");
const dark = new Map(Object.entries(read("dark")));
const scheme = matchMedia("(prefers-color-scheme: dark)");

function painted(value, key) {
  if (Array.isArray(value)) return value.map((part) => painted(part, key));
  if (value !== null && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, painted(part, name)]));
  }
  return scheme.matches && key.endsWith("color") && dark.has(value) ? dark.get(value) : value;
}

function draw() {
  for (const [id, figure] of Object.entries(figures)) {
    const options = { responsive: true, displayModeBar: false, showLink: false, displaylogo: false };
    Plotly.react(id, painted(figure.data, ""), painted(figure.layout, ""), options);
  }
}

draw();
scheme.addEventListener("change", draw);
