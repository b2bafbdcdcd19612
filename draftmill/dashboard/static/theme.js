// Light, dark, or as the system has it.

const ORDER = ["system", "light", "dark"];
const KEY = "draftmill-theme";

/** @returns {string} */
export function chosen() {
  try {
    const kept = localStorage.getItem(KEY);
    return kept && ORDER.includes(kept) ? kept : "system";
  } catch {
    return "system";
  }
}

/** Make the chosen theme visible. */
export function apply() {
  const theme = chosen();
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

/** Choose the next theme. */
export function cycle() {
  try {
    localStorage.setItem(KEY, ORDER[(ORDER.indexOf(chosen()) + 1) % ORDER.length]);
  } catch {
    // A page from a file may not keep anything.
  }
  apply();
}

/** @param {string} name @returns {string} a colour of the style sheet */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
