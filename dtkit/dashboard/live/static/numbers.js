// Numbers as text, as in _util/formatting.py.

const NOTHING = "—";
const WHOLE_FORMAT = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 }), TICK_FORMAT = new Intl.NumberFormat("en-US", { maximumFractionDigits: 12 });

/** Return a loss, a metric or a rate, as `format_loss` of Python; none where a value isn't finite. */
export function number(value, digits = 3) {
  if (value === null || !Number.isFinite(value)) return NOTHING;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e7 || size < 1e-4) return exponent(value, 2);
  if (size >= 1e6) return WHOLE_FORMAT.format(+value.toPrecision(3));
  if (size >= 100) return WHOLE_FORMAT.format(value);
  if (size < 1e-3) return String(+value.toPrecision(2));
  return String(value.toPrecision(digits));
}
const SMALL_NUMBER = 1e-2, LARGE_NUMBER = 1e4; // beyond which numbers of a column have powers of ten where one of them needs one

/** Return the numbers of a column in one form: with equally many decimals, or with powers of ten where one of them needs one. */
export function numberColumn(values) {
  const known = values.filter((value) => Number.isFinite(value) && value !== 0), sizes = known.map(Math.abs);
  const hasSmall = sizes.some((size) => size < 1e-4), hasLarge = sizes.some((size) => size >= 1e7);
  const isPower = (value) => (hasSmall && Math.abs(value) < SMALL_NUMBER) || (hasLarge && Math.abs(value) >= LARGE_NUMBER);
  const decimals = Math.max(0, ...known.filter((value) => !isPower(value)).map((value) => (number(value).split(".")[1] ?? "").length));
  const plain = new Intl.NumberFormat("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return NOTHING;
    if (value === 0) return "0";
    return isPower(value) ? value.toExponential(1).replace("+", "") : plain.format(value);
  });
}
export function bytes(value) {
  if (!Number.isFinite(value)) return NOTHING;
  if (value < 999.5) return `${Math.round(value)} B`;
  for (const unit of ["kB", "MB", "GB", "TB"]) {
    value /= 1000;
    if (value < 999.5) return `${Number(value.toPrecision(3))} ${unit}`;
  }
  return `${Math.round(value).toLocaleString("en-US")} TB`;
}
export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}
/** Return how long a run took, rounded down. */
export function elapsedTime(seconds) {
  return seconds >= 0.1 && seconds < 10 ? `${(Math.floor(10 * seconds) / 10).toFixed(1)} s` : clock(seconds);
}
/** Return a short time with its unit. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return NOTHING;
  if (seconds <= 0) return "0 s";
  if (seconds < 0.9995e-3) return `${Math.round(1e6 * seconds)} µs`;
  if (seconds < 0.9995) return `${(1e3 * seconds).toFixed(seconds < 9.95e-3 ? 1 : 0)} ms`;
  return seconds < 9.995 ? `${seconds.toFixed(2)} s` : clock(Math.round(seconds));
}
/** Return a number with `digits` significant digits and a power of ten, as in "5e19". */
export function exponent(value, digits) {
  return (+value.toPrecision(digits)).toExponential().replace("+", "");
}
const PLAIN_RATE_CHARS = 9; // 0.00000146 can't be read at a glance

/** Return a learning rate as charts label it, as `format_learning_rate` of Python; none is empty. */
export function shortRate(value) {
  if (value === null) return "";
  const plain = String(+value.toPrecision(4));
  if (value >= 1e5 || plain.length > PLAIN_RATE_CHARS) return exponent(value, 4);
  return value < 1e3 ? plain : TICK_FORMAT.format(Number(plain));
}
export function tick(value) {
  if (Math.abs(value) >= 1e9) return exponent(value, 3);
  if (Math.abs(value) >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (Math.abs(value) >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (value !== 0 && Math.abs(value) < 1e-3) return exponent(value, 3);
  const short = +value.toPrecision(6);
  return Math.abs(short) < 1e3 ? String(short) : TICK_FORMAT.format(short); // a format takes far longer
}
const ONE_UNIT_RATIO = 1e3; // of the largest to the smallest number of an axis that has a single unit

/**
 * Return how the numbers of one axis are written, all in one form: as they are, in thousands or millions, or with powers of
 * ten, which all but 0 to 10 have where one of them needs them.
 */
export function tickFormat(values) {
  const sizes = values.map(Math.abs).filter((size) => size > 0), most = Math.max(...sizes), least = Math.min(...sizes);
  if (most >= 1e9 || least < 1e-3) return (value) => (value === 0 || (Math.abs(value) >= 1 && Math.abs(value) < 10) ? tick(value) : exponent(value, 4));
  if (!(most >= 1e4)) return tick;
  const [size, unit] = most >= 1e6 ? [1e6, "M"] : [1e3, "k"], isRange = most < ONE_UNIT_RATIO * least;
  const isExact = values.every((value) => value === 0 || Math.abs(+(value / size).toPrecision(3) * size / value - 1) < 1e-9);
  if (isRange) return (value) => (isExact ? `${+(value / size).toPrecision(3)}${value === 0 ? "" : unit}` : TICK_FORMAT.format(value));
  return (value) => (Math.abs(value) >= 1e3 && Math.abs(value) < 1e4 ? `${+(value / 1e3).toPrecision(3)}k` : tick(value));
}
/** Return about `count` round values between low and high. */
export function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw)), factors = [10, 5, 2.5, 2, 1, 0.5], roomy = factors.filter((m) => m * power >= raw);
  const finer = factors.filter((m) => m * power < raw);
  let found = [];
  for (const m of [roomy.at(-1), ...finer]) { // an axis with a single number says nothing about its scale
    const step = m * power;
    found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * Math.abs(high); k++) found.push(k * step);
    if (found.length > 1) break;
  }
  return found;
}

/** Return round values between low and high for a logarithmic scale: powers of ten, with others between them where there is room. */
export function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), most = 1.5 * count;
  let within = [];
  for (const factors of [[1, 2, 5], [1, 3], [1]]) {
    within = roundPowers(first, last, 1, factors).filter((v) => v >= low && v <= high);
    if (within.length <= most) break;
  }
  if (within.length > most) within = roundPowers(first, last, Math.ceil((last - first) / count), [1]).filter((v) => v >= low && v <= high);
  return within.length > 1 ? within : ticks(low, high, count);
}
function roundPowers(first, last, every, factors) {
  const found = [];
  for (let power = Math.ceil(first / every) * every; power <= last; power += every) for (const f of factors) found.push(f * 10 ** power);
  return found;
}

export function share(part) {
  if (!Number.isFinite(part)) return NOTHING;
  const percent = 100 * part;
  return percent >= 0.05 && percent < 0.95 ? `${percent.toFixed(1)} %` : `${percent.toFixed(0)} %`;
}
