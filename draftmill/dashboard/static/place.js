// Where in the pages one is: the part of the address behind #, as #samples?kind=longest, so that it can be kept and sent.

/** @returns {{view: string, asked: URLSearchParams}} */
export function place() {
  const [view, query] = location.hash.slice(1).split("?");
  return { view: view || "overview", asked: new URLSearchParams(query ?? "") };
}

/**
 * The address of a view with some things asked for.
 * @param {string} view
 * @param {Object<string, string | number | null | undefined>} [asked]
 * @returns {string}
 */
export function address(view, asked = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(asked)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  }
  return query.size ? `#${view}?${query}` : `#${view}`;
}

/**
 * Ask for something else in the view that is shown.
 * @param {Object<string, string | number | null | undefined>} changes
 */
export function ask(changes) {
  const { view, asked } = place();
  location.hash = address(view, { ...Object.fromEntries(asked), ...changes });
}
