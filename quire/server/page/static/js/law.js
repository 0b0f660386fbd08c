// The time and the cost of a step, from GET /steps/law: quire/engine/step_law.py and
// quire/program/features.py.
// Rows are [start, count]. Costs are exact; times are predictions.

/** Return the features of a step, in the order of the law. */
export function values(law, rows, numLogits) {
  const tokens = sum(rows.map(([, count]) => count));
  return law.features.map(({ kind, window, chosen, num_experts: experts }) => {
    switch (kind) {
      case "one":
        return 1;
      case "rows":
        return rows.length;
      case "tokens":
        return tokens;
      case "logits":
        return numLogits;
      case "tiles":
        return Math.ceil(tokens / window);
      case "positions":
        return sum(rows.map((row) => positions(row, window)));
      case "pairs":
        return sum(rows.map((row) => pairs(row, window)));
      case "chunk_pairs":
        return sum(rows.map(([start, count]) => inChunks(start + count, window) - inChunks(start, window)));
      case "experts":
        return 1 - (1 - chosen / experts) ** tokens;
      case "logit_experts":
        return 1 - (1 - chosen / experts) ** numLogits;
      case "earlier":
        return sum(rows.map(([start]) => Math.min(start, window)));
      case "latest":
        return sum(rows.map(([, count]) => Math.min(count, window)));
      case "since_boundary":
        return sum(rows.map(([start]) => start % window));
      case "past_boundary":
        return rows.filter(([start]) => start >= window).length;
      case "boundaries":
        return sum(
          rows.map(([start, count]) => Math.min(2, whole(start + count, window) - whole(start, window))),
        );
      case "positions_beyond":
        return sum(rows.map(([start, count]) => (start + count > window ? start + count : 0)));
      case "pairs_beyond":
        return sum(
          rows.map(([start, count]) => Math.max(0, upTo(start + count) - upTo(Math.max(start, window)))),
        );
      default:
        throw new Error(`unknown feature ${kind}`);
    }
  });
}

/** Return the predicted seconds of a step with these features. */
export const seconds = (law, found) =>
  dot(law.overhead, found) + sum(law.stages.map((one) => longer(one, found)));

/** Return the seconds at the measured ceilings: in all, of memory alone, and of arithmetic alone. */
export function roof(law, found) {
  const memory = sum(law.roof.map((one) => dot(one.memory, found)));
  const arithmetic = sum(law.roof.map((one) => dot(one.arithmetic, found)));
  return { seconds: sum(law.roof.map((one) => longer(one, found))), memory, arithmetic };
}

/** Return the exact cost of a step: flops, weight_bytes, kv_read_bytes, kv_write_bytes, activation_bytes. */
export const cost = (costs, found) =>
  Object.fromEntries(Object.entries(costs).map(([name, row]) => [name, dot(row, found)]));

/** What limits a step with these features: "memory", "arithmetic" or "overhead". */
export function bound(law, found) {
  const memory = [],
    arithmetic = [];
  for (const one of law.stages) {
    const [reads, computes] = [dot(one.memory, found), dot(one.arithmetic, found)];
    (reads >= computes ? memory : arithmetic).push(Math.max(reads, computes));
  }
  const all = { overhead: dot(law.overhead, found), memory: sum(memory), arithmetic: sum(arithmetic) };
  return Object.entries(all).sort((a, b) => b[1] - a[1])[0][0];
}

const dot = (coefficients, found) =>
  coefficients.reduce((total, one, index) => total + one * found[index], 0);
const longer = (stage, found) => Math.max(dot(stage.memory, found), dot(stage.arithmetic, found));
const whole = (position, size) => Math.floor(position / size);

/** Pairs of all tokens before a position. */
const upTo = (end) => (end * (end + 1)) / 2;

/** Pairs in chunks of all tokens before a position. */
function inChunks(position, chunk) {
  const rest = position % chunk;
  return (whole(position, chunk) * chunk * (chunk + 1) + rest * (rest + 1)) / 2;
}
export const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);

/** Cached positions that a row reads, within a window (0: none). */
function positions([start, count], window) {
  return window ? start + count - Math.max(0, start + 1 - window) : start + count;
}

/** Pairs of a token and a position that it sees. */
function pairs([start, count], window) {
  const all = (count * (2 * start + count + 1)) / 2;
  if (!window) return all;
  const beyond = Math.max(0, start + count - window),
    before = Math.max(0, start - window);
  return all - (beyond * (beyond + 1) - before * (before + 1)) / 2;
}
