// Exponential moving averages by steps: charts draw different numbers of points, and one weight must mean the same in all.

/**
 * Return the exponential moving average of a line's means, without the bias of its start; NaN stays NaN.
 *
 * A value counts `weight` times as much a step later. A point stands for all steps of its span, or of `grain.steps(line, at)`
 * where the positions are no steps; its average is that in the middle of them. `grain.earlier` has coarser points of the
 * steps before, so that a part of a line is as smooth as in the whole.
 */
export function movingAverage(grain, line, weight) {
  const average = newAverage(weight), { earlier } = grain, start = earlier && grain.used ? grain.span(0)[0] : -Infinity;
  for (let at = 0; earlier && at < earlier.used && earlier.span(at)[1] < start; at++) average(earlier.value(line, at, 1), spanOf(earlier, line, at));
  return Array.from({ length: grain.used }, (_, at) => average(grain.value(line, at, 1), spanOf(grain, line, at)));
}
function spanOf(grain, line, at) {
  return grain.steps ? grain.steps(line, at) : grain.span(at);
}

const LEAST_STEPS = 1e-6; // a part of a time axis may be within a step

/** Return a function that takes a value and the first and last of its steps, and returns the average in their middle. */
function newAverage(weight) {
  let sum = 0, norm = 0, end = NaN;
  return (v, [from, to]) => {
    if (Number.isNaN(v)) return NaN;
    const gap = weight ** Math.max(0, from - end - 1 || 0), steps = Math.max(LEAST_STEPS, to - from + 1), half = weight ** Math.min(steps, (steps + 1) / 2), whole = weight ** steps;
    [sum, norm] = [sum * gap, norm * gap];
    const middle = (sum * half + (1 - half) * v) / (norm * half + 1 - half);
    [sum, norm, end] = [sum * whole + (1 - whole) * v, norm * whole + 1 - whole, to];
    return middle;
  };
}
