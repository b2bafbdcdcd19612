// Where the data come from: the server, or what a report carries inside itself.

/** @type {any} */
let carried;

/** @returns {any} the data inside a static report; null on a served page */
export function embedded() {
  if (carried === undefined) {
    const element = document.getElementById("data");
    carried = element ? JSON.parse(element.textContent ?? "null") : null;
  }
  return carried;
}

/**
 * @typedef {{value: any, stamp: string, busy: boolean, error: string | null}} Held
 * @type {Map<string, Held>}
 */
const held = new Map();
const ROOM = 60;
const AGAIN_MS = 5000;
/** @type {() => void} */
let arrived = () => {};

/** @param {() => void} callback called whenever something that was asked for has come */
export function onArrival(callback) {
  arrived = callback;
}

/**
 * What is known at a path now, and a request for it if it is not known or was asked for with another stamp.
 * @param {string} path such as "api/quality?x=1"
 * @param {string | number} [stamp] changes when the answer may have
 * @returns {Held}
 */
export function need(path, stamp = "") {
  const inside = embedded();
  if (inside) return { value: inside[path] ?? null, stamp: "", busy: false, error: path in inside ? null : "not in this report" };
  const found = held.get(path) ?? { value: null, stamp: "\0", busy: false, error: null };
  held.delete(path);
  held.set(path, found);
  if (held.size > ROOM) held.delete(held.keys().next().value);
  if (!found.busy && found.stamp !== String(stamp)) request(path, String(stamp), found);
  return found;
}

/** @param {string} path @returns {any} what was last told of a path, without asking */
export function known(path) {
  return held.get(path)?.value ?? null;
}

/** @param {string} path @param {string} stamp @param {Held} found */
async function request(path, stamp, found) {
  found.busy = true;
  found.stamp = stamp;
  try {
    const answer = await fetch(path, { headers: { accept: "application/json" } });
    const value = answer.headers.get("content-type")?.startsWith("application/json") ? await answer.json() : null;
    if (answer.ok) Object.assign(found, { value, error: null });
    else found.error = value?.error ?? `the dashboard answers with status ${answer.status}`;
  } catch (error) {
    found.error = "no connection to the dashboard";
  }
  found.busy = false;
  // Whatever went wrong may pass: a view that is still shown asks again.
  if (found.error) setTimeout(() => again(found), AGAIN_MS);
  arrived();
}

/** @param {Held} found */
function again(found) {
  if (found.error && !found.busy) found.stamp = "\0";
  arrived();
}

/**
 * States as the server pushes them, while the page can be seen: a browser has few connections to a server, and the
 * streams of pages that nobody sees would take them all.
 * @param {(message: any) => void} told
 * @param {(connected: boolean) => void} connected
 */
export function follow(told, connected) {
  /** @type {EventSource | null} */
  let stream = null;
  const close = () => { stream?.close(); stream = null; };
  const open = () => {
    if (stream || document.hidden) return;
    const opened = new EventSource("events");
    stream = opened;
    opened.addEventListener("state", (event) => told(JSON.parse(event.data)));
    opened.addEventListener("open", () => connected(true));
    opened.addEventListener("error", () => {
      if (stream !== opened) return;
      connected(false);
      // A server that answered with an error has closed the stream for good.
      if (opened.readyState === EventSource.CLOSED) { close(); setTimeout(open, 3000); }
    });
  };
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  open();
}
