// Numbers, times and sizes as short text.

const COUNT = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const UNITS = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];
const BYTES = ["bytes", "kB", "MB", "GB", "TB", "PB"];

/** @param {number | null | undefined} value @returns {string} 1,234 or 12.3; a dash where it is not known */
export function count(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 || Number.isInteger(value) ? COUNT.format(value) : value.toFixed(1);
}

/** @param {number | null | undefined} value @returns {string} 1.2M, for places with little room */
export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]].find(([least]) => value >= least);
  if (!size) return count(value);
  const shown = value / (size[1] === "k" ? 1e3 : size[0]);
  return `${shown >= 100 ? shown.toFixed(0) : shown.toFixed(1)}${size[1]}`;
}

/** @param {number} share @returns {string} */
export function percent(share) {
  const value = share * 100;
  return value !== 0 && value < 0.1 ? "<0.1%" : `${value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1)}%`;
}

/** @param {number | null | undefined} seconds @returns {string} the two largest units: 2 d 3 h, 14 min 5 s */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(Math.max(seconds, 0));
  for (const [large, name, small, part] of UNITS) {
    if (whole < large) continue;
    const rest = Math.floor((whole % large) / small);
    return `${Math.floor(whole / large)} ${name}${rest ? ` ${rest} ${part}` : ""}`;
  }
  return `${whole} s`;
}

/** @param {number | null | undefined} bytes @returns {string} */
export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  let value = bytes, unit = 0;
  while (value >= 1000 && unit < BYTES.length - 1) { value /= 1000; unit += 1; }
  return unit ? `${value.toFixed(1)} ${BYTES[unit]}` : `${value} bytes`;
}

/** @param {number | null | undefined} at seconds since 1970 @returns {string} local date and time */
export function moment(at) {
  if (at === null || at === undefined) return "–";
  const time = new Date(at * 1000);
  const two = (/** @type {number} */ n) => String(n).padStart(2, "0");
  return `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} ${clock(at)}`;
}

/** @param {number} at @returns {string} local time of day */
export function clock(at) {
  return new Date(at * 1000).toTimeString().slice(0, 8);
}

/** @param {any} eta @returns {string} the interval, or unknown and why */
export function eta(eta) {
  if (eta.low === null || eta.high === null) return eta.reason === "not begun" ? eta.reason : `unknown: ${eta.reason}`;
  if (eta.high === 0) return "done";
  const [low, high] = [duration(eta.low), duration(eta.high)];
  return low === high ? low : `${low} to ${high}`;
}

/** @param {string} name @returns {string} a code as words */
export function words(name) {
  return name.replaceAll("_", " ");
}

/** @param {number} number @param {string} noun @returns {string} 1 shard, 2 shards */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
