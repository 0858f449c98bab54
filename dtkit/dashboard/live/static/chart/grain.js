// The drawn points of a chart, whatever they come from: buckets of the store, or single evaluations.
//
// A grain is {used, lines, value(line, at, which), step(at), span(at), find(step)}; `which` is 0 smallest, 1 mean,
// 2 largest; the last line is the one over all nodes.

const MIDDLE = [0.1, NaN, 0.9]; // as in summary/curves.py

/**
 * Return the grain of `curves`, for the chart with this layout among `columns`. With `most`, buckets are merged until at
 * most that many are left; then 0 and 2 are the quantiles MIDDLE of the merged means, or of the edges of a band of many nodes.
 * The last bucket may have fewer steps than the others: it counts by these, and stands in their middle. Merged ones are the
 * means of many steps, so few last steps are a part of the bucket before them.
 */
export function bucketGrain(curves, columns, layout, most) {
  const { data, used, width, origin } = curves, lines = layout.nodes + 1, end = Math.min(curves.last ?? Infinity, origin + used * width - 1);
  const raw = (line, bucket, which) => data[(bucket * columns + layout.first + line) * 3 + which];
  let each = 1;
  while (most && used > most * each) each *= 2;
  const wide = width * each, count = countMerged(used, each, end - origin + 1, width);
  const endOf = (at) => (at === count - 1 ? used : (at + 1) * each);
  const value = each === 1 ? raw : (line, bucket, which) => {
    const found = [], source = layout.banded && line < layout.nodes ? which : 1;
    let [sum, steps] = [0, 0];
    for (let b = bucket * each; b < endOf(bucket); b++) {
      const v = raw(line, b, source);
      if (Number.isNaN(v)) continue;
      const own = Math.min(width, end - origin - b * width + 1);
      [sum, steps] = [sum + own * v, steps + own];
      found.push(v);
    }
    if (!found.length) return NaN;
    return which === 1 ? sum / steps : quantile(found, MIDDLE[which]);
  };
  const span = (at) => [origin + at * wide, Math.min(origin + endOf(at) * width - 1, end)];
  return {
    used: count, lines, wide, value, span,
    step: (at) => { const [from, to] = span(at); return (from + to) / 2; },
    find: (step) => Math.min(count - 1, Math.max(0, Math.floor((step - origin) / wide))),
  };
}

/** Return the number of merged buckets, of which the last has at least half as many steps as the others. */
function countMerged(used, each, steps, width) {
  const count = Math.ceil(used / each), left = steps - (count - 1) * each * width;
  return each > 1 && count > 1 && 2 * left < each * width ? count - 1 : count;
}

function quantile(values, share) {
  values.sort((a, b) => a - b);
  const at = share * (values.length - 1), low = Math.floor(at), next = values[Math.min(low + 1, values.length - 1)];
  return values[low] + (at - low) * (next - values[low]);
}

/** Return the grain of single points {step, value} of one line, in the order of their steps. */
export function pointGrain(points) {
  const find = (step) => {
    let best = 0;
    points.forEach((point, k) => { if (Math.abs(point.step - step) < Math.abs(points[best].step - step)) best = k; });
    return best;
  };
  return {
    used: points.length, lines: 1, wide: 1, find,
    value: (_line, at) => points[at].value,
    step: (at) => points[at].step,
    span: (at) => [points[at].step, points[at].step],
  };
}

/**
 * Return the grain of a series of the store: rows of a step and a value for each line, infinite where the line has lost its
 * numbers. `merged` has the width of a row in steps, and the first and the last step of all; without it, a row has one step.
 */
export function seriesGrain({ points, lines, values, merged: [width, origin, last] = [1, 0, Infinity] }) {
  const step = (at) => values[at * (lines + 1)], raw = (line, at) => values[at * (lines + 1) + 1 + line];
  const span = (at) => {
    if (width === 1) return [Math.round(step(at)), Math.round(step(at))];
    const from = origin + Math.floor((step(at) - origin) / width) * width;
    return [from, Math.min(from + width - 1, last)];
  };
  const find = (wanted) => {
    let best = 0;
    for (let at = 1; at < points; at++) if (Math.abs(step(at) - wanted) < Math.abs(step(best) - wanted)) best = at;
    return best;
  };
  const value = (line, at) => { const v = raw(line, at); return v === Infinity ? NaN : v; };
  return { used: points, lines, wide: 1, find, step, value, isLost: (line, at) => raw(line, at) === Infinity, span };
}

/** Return the reciprocals of values: samples per second, from seconds per sample. */
export function inverted(value) {
  return (line, at, which) => 1 / value(line, at, 2 - which);
}

/** Leave out what a logarithmic scale can't show. */
export function onlyPositive(value) {
  return (line, at, which) => { const v = value(line, at, which); return v > 0 ? v : NaN; };
}

/** Return whether some mean is negative. */
export function hasNegative(grain) {
  for (let at = 0; at < grain.used; at++) for (let line = 0; line < grain.lines; line++) if (grain.value(line, at, 1) < 0) return true;
  return false;
}

const LEAST_SHARE = 0.1, LOWER_IS_BETTER = /loss|error|perplexity|mse|mae|distance|divergence|kl/i;

/** Return whether values are shares, such as an accuracy or a probability, which a linear axis shows as they are meant. */
export function areShares(grain, name) {
  let high = -Infinity;
  if (LOWER_IS_BETTER.test(name)) return false;
  for (let at = 0; at < grain.used; at++) {
    for (let line = 0; line < grain.lines; line++) {
      const v = grain.value(line, at, 1);
      if (v < 0 || v > 1) return false;
      if (v > high) high = v;
    }
  }
  return high >= LEAST_SHARE; // a learning rate is smaller
}

// From this ratio on, the smallest values are less than a pixel above 0 on a linear axis: most charts are below 200 pixels.
const ORDERS = 200, BLOCKS = 16; // as in summary/value_scale.py

/** Return the means of of(value, at) over the known values in each of BLOCKS parts of a line's points. */
function blockMeans(grain, line, isKnown, of = (v) => v) {
  const blocks = Math.min(grain.used, BLOCKS), means = [];
  for (let block = 0; block < blocks; block++) {
    let [sum, count] = [0, 0];
    for (let at = Math.floor(block * grain.used / blocks); at < Math.floor((block + 1) * grain.used / blocks); at++) {
      const v = grain.value(line, at, 1);
      if (isKnown(v, at)) [sum, count] = [sum + of(v, at), count + 1];
    }
    if (count) means.push(sum / count);
  }
  return means;
}

/**
 * Return whether values are so different that a linear axis would hide the smaller ones. None is negative; zeros don't
 * count. Small values are means of some steps: a single one is often small by chance, and whether it is among the drawn
 * ones depends on the buckets, which another view of the same run has otherwise. `areRuns`: each line counts, not only the last.
 */
export function spansOrders(grain, most = Infinity, areRuns = false) {
  let [low, high] = [Infinity, -Infinity];
  if (hasNegative(grain)) return false;
  for (let line = areRuns ? 0 : grain.lines - 1; line < grain.lines; line++) {
    low = Math.min(low, ...blockMeans(grain, line, (v) => v > 0 && v <= most));
    for (let at = 0; at < grain.used; at++) {
      const v = grain.value(line, at, 1);
      if (v <= most) high = Math.max(high, v);
    }
  }
  return high > 0 && high >= ORDERS * low;
}

/** Return the smallest value in sight, of lines and of bands: where a band ends whose own value a logarithmic scale can't show. */
export function leastInSight(grain, shown, from, to) {
  let least = Infinity;
  for (let line = 0; line < grain.lines; line++) {
    if (!shown(line)) continue;
    for (let at = 0; at < grain.used; at++) {
      if (grain.span(at)[1] < from || grain.span(at)[0] > to) continue;
      for (const which of [0, 1]) {
        const v = grain.value(line, at, which);
        if (v < least) least = v;
      }
    }
  }
  return least;
}

const LOG_ROOM = 4; // times below the lowest part of a line

/**
 * Return down to where a logarithmic axis has to show the points in sight: a little below the lowest part of a line, and to
 * its last value. Single small values would take an axis down by orders, and leave its upper third to the line.
 */
function logFloor(grain, shown, from, to, smoothed) {
  let floor = Infinity;
  for (let line = 0; line < grain.lines; line++) {
    if (!shown(line)) continue;
    const drawn = (v, at) => smoothed[line]?.[at] ?? v, isInSight = (at) => grain.span(at)[1] >= from && grain.span(at)[0] <= to;
    const means = blockMeans(grain, line, (v, at) => drawn(v, at) > 0 && isInSight(at), (v, at) => Math.log(drawn(v, at)));
    floor = Math.min(floor, ...means.map((mean) => Math.exp(mean) / LOG_ROOM));
    let last = grain.used - 1;
    while (last >= 0 && !(isInSight(last) && grain.value(line, last, 1) > 0)) last--;
    if (last >= 0) floor = Math.min(floor, drawn(grain.value(line, last, 1), last));
  }
  return floor;
}

const RARE = 0.02, RARE_ROOM = 0.25;

/**
 * Return the limits of the values in sight, with some room. `robust` leaves the rarest values outside, and `most` all above
 * it if some are below. `averages(line)` are the values of a smoothed line, which may be far from those in sight.
 */
export function valueLimits(grain, { shown, from, to, extra, averages = () => null, isLog, robust, fromZero, most = Infinity }) {
  let [low, high] = [Infinity, -Infinity];
  const means = [], smoothed = Array.from({ length: grain.lines }, (_, line) => (shown(line) ? averages(line) : null));
  for (let at = 0; at < grain.used; at++) {
    if (grain.span(at)[1] < from || grain.span(at)[0] > to) continue;
    for (let line = 0; line < grain.lines; line++) {
      const mean = shown(line) ? grain.value(line, at, 1) : NaN;
      if (Number.isNaN(mean) || mean > most) continue;
      const least = grain.value(line, at, 0); // NaN on a logarithmic scale, where it is 0
      low = Math.min(low, Number.isNaN(least) ? mean : least);
      high = Math.max(high, Math.min(Math.max(mean, most), grain.value(line, at, 2)));
      if (robust) means.push(mean);
      if (!smoothed[line]) continue;
      [low, high] = [Math.min(low, smoothed[line][at]), Math.max(high, Math.min(smoothed[line][at], most))];
      if (robust) means.push(smoothed[line][at]);
    }
  }
  if (low > high && most < Infinity) return valueLimits(grain, { shown, from, to, extra, averages, isLog, robust, fromZero });
  const floor = isLog ? logFloor(grain, shown, from, to, smoothed) : Infinity;
  if (floor < Infinity) low = Math.max(low, floor);
  for (const v of extra) [low, high] = [Math.min(low, v), Math.max(high, v)];
  if (low > high) [low, high] = isLog ? [0.1, 1] : [0, 1];
  if (robust && means.length > 4) [low, high] = commonLimits(means, low, high);
  if (isLog) return [low / 1.1, high * 1.1];
  if (fromZero) low = Math.min(0, low);
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return [fromZero && low === 0 ? 0 : low - room, high + room];
}

function commonLimits(means, low, high) {
  means.sort((a, b) => a - b);
  const [least, most] = [means[Math.floor(RARE * (means.length - 1))], means[Math.ceil((1 - RARE) * (means.length - 1))]];
  const room = RARE_ROOM * (most - least);
  return [Math.max(low, least - room), Math.min(high, most + room)];
}
