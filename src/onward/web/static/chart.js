// A live chart: a thin line of values, a bold line of their moving average, and dots for validations.

const NAMESPACE = "http://www.w3.org/2000/svg";
const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [216, 46, 12, 12, 24];

export class Chart {
  // `format` formats a value; `least` and `most` (optional) are values that the axis always includes.
  constructor(figure, { name, format, least, most }) {
    Object.assign(this, { figure, name, format, least, most });
    this.svg = element("svg", { role: "img", "aria-label": `${name}: no values yet` });
    figure.append(this.svg);
    this.latest = [[], [], []];
    new ResizeObserver(() => this.draw(...this.latest)).observe(figure);
  }

  // `dots` are [step, value].
  draw(steps, values, dots) {
    this.latest = [steps, values, dots];
    const width = Math.max(this.figure.clientWidth, 160);
    const all = [...values, ...dots.map(([, value]) => value)].filter(Number.isFinite);
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("height", HEIGHT);
    if (!all.length) {
      const hint = this.#add("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle", class: "empty" });
      hint.textContent = "Starts with training.";
      return;
    }
    const last = Math.max(steps.at(-1) ?? 0, dots.at(-1)?.[0] ?? 0, 1);
    const [low, high] = this.#range(all);
    const x = (step) => LEFT + (step / last) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    this.#axes(low, high, last, x, y, width);
    if (values.length > 1) {
      this.#add("path", { d: path(thin(steps, values, width), x, y), class: "raw" });
      this.#add("path", { d: path(thin(steps, smooth(values), width), x, y), class: "smooth" });
    }
    if (dots.length > 1) this.#add("path", { d: path(dots, x, y), class: "dotted" });
    const shown = dots.length > width / 8 ? dots.slice(-1) : dots;
    for (const [step, value] of shown) this.#add("circle", { cx: x(step), cy: y(value), r: 3.5, class: "dot" });
    this.#describe(values, dots, last);
  }

  #range(all) {
    const low = all.reduce((a, b) => Math.min(a, b), this.least ?? Infinity);
    const high = all.reduce((a, b) => Math.max(a, b), this.most ?? -Infinity);
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  #axes(low, high, last, x, y, width) {
    for (const tick of ticks(low, high, 4)) {
      this.#add("line", { x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick), class: "grid-line" });
      const text = this.#add("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" });
      text.textContent = this.format(tick);
    }
    const steps = ticks(0, last, Math.max(Math.floor(width / 110), 2)).filter(Number.isInteger);
    for (const tick of steps) {
      const anchor = !tick ? "start" : x(tick) > width - 40 ? "end" : "middle";
      const text = this.#add("text", { x: Math.min(x(tick), width - 4), y: HEIGHT - 6, "text-anchor": anchor });
      text.textContent = tick.toLocaleString("en") + (tick === steps.at(-1) ? " steps" : "");
    }
  }

  #describe(values, dots, last) {
    const now = dots.length ? dots.at(-1)[1] : values.at(-1);
    const first = dots.length ? dots[0][1] : values[0];
    const text = `${this.name}: from ${this.format(first)} to ${this.format(now)} in ${last} steps`;
    this.svg.setAttribute("aria-label", text);
  }

  #add(name, attributes) {
    const child = element(name, attributes);
    this.svg.append(child);
    return child;
  }
}

function element(name, attributes) {
  const created = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) created.setAttribute(key, value);
  return created;
}

function path(points, x, y) {
  const good = points.filter(([, value]) => Number.isFinite(value));
  return good.map(([step, value], at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
}

// Thin a curve to one point per pixel.
function thin(steps, values, width) {
  const every = Math.max(Math.ceil(values.length / width), 1);
  return steps.map((step, at) => [step, values[at]]).filter((_, at) => at % every === 0 || at === values.length - 1);
}

// Return the moving average over a centered window, which grows with the length of the curve.
export function smooth(values) {
  const reach = Math.ceil(values.length / 60);
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, at) => {
    const [first, end] = [Math.max(at - reach, 0), Math.min(at + reach + 1, values.length)];
    return (sums[end] - sums[first]) / (end - first);
  });
}

// Return round numbers between two numbers.
export function ticks(low, high, most) {
  const rough = (high - low) / most || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const numbers = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++)
    numbers.push(Number((at * step).toPrecision(12)));
  return numbers;
}
