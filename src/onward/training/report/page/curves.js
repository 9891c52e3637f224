// Curves over steps: loss, metrics, learning rate, speed. All share one cross-hair.

const COLOURS = { training: "var(--train)", validation: "var(--valid)", line: "var(--l0)" };
const LINES = ["var(--l0)", "var(--l1)", "var(--l2)", "var(--l3)", "var(--l4)", "var(--l5)"];

/** Averages over neighbours, weighted by a bell curve that is `width` points wide; gaps stay gaps. */
function smoothed(values, width) {
  if (width < 0.3) return values;
  const reach = Math.ceil(width * 3);
  const bell = Array.from({ length: reach + 1 }, (_, i) => Math.exp(-0.5 * (i / width) ** 2));
  return values.map((value, i) => {
    if (value === null) return null;
    let sum = 0, weight = 0;
    for (let j = Math.max(0, i - reach); j <= Math.min(values.length - 1, i + reach); j++) {
      if (values[j] === null) continue;
      sum += values[j] * bell[Math.abs(i - j)];
      weight += bell[Math.abs(i - j)];
    }
    return sum / weight;
  });
}

/** The `d` of a path through points; null, or what a logarithmic scale has no place for, is a gap. */
function path(xs, ys, x, y, log) {
  let d = "", pen = "M";
  for (let i = 0; i < xs.length; i++) {
    if (ys[i] === null || (log && ys[i] <= 0)) { pen = "M"; continue; }
    d += `${pen}${x(xs[i]).toFixed(1)} ${y(ys[i]).toFixed(1)}`;
    pen = "L";
  }
  return d;
}

/** A closed path between the least and the largest values. */
function band(series, x, y, log) {
  const good = series.x.map((_, i) => i).filter((i) => series.low[i] !== null && (!log || series.low[i] > 0));
  if (!good.length) return "";
  const there = good.map((i) => `${x(series.x[i]).toFixed(1)} ${y(series.high[i]).toFixed(1)}`);
  const back = good.reverse().map((i) => `${x(series.x[i]).toFixed(1)} ${y(series.low[i]).toFixed(1)}`);
  return `M${there.join("L")}L${back.join("L")}Z`;
}

class Curves {
  constructor(figure, chart, run, crosshair) {
    Object.assign(this, { figure, chart, run, crosshair, log: chart.log });
    this.plot = figure.querySelector(".plot");
    const lines = chart.series.every((series) => series.role === "line") && chart.series.length > 1;
    this.colours = chart.series.map((series, i) => (lines ? LINES[i % LINES.length] : COLOURS[series.role]));
    this.legend(figure.querySelector(".legend"));
    crosshair.charts.push(this);
  }

  /** Names with their colours and values: those at the end, or at the cross-hair. */
  legend(parent) {
    this.readouts = this.chart.series.map((series, i) => {
      const item = make(parent, "span");
      if (series.role !== "line" || this.chart.series.length > 1) {
        make(item, "i").style.background = this.colours[i];
        item.append(`${series.name} `);
      }
      return make(item, "b");
    });
    this.at = make(parent, "span", "at");
    if (this.numbers().some((value) => value > 0)) {
      const button = make(parent, "button", "", "log");
      button.type = "button";
      button.title = "logarithmic scale";
      button.setAttribute("aria-pressed", this.log);
      button.onclick = () => {
        this.log = !this.log;
        button.setAttribute("aria-pressed", this.log);
        this.redraw();
      };
    }
  }

  /** All numbers that are drawn. */
  numbers() {
    return this.chart.series.flatMap((series) => [series.y, series.low || [], series.high || []].flat());
  }

  /** The first chart, which tells more. */
  large() {
    return this.figure.matches(".curve:first-child");
  }

  redraw(smoothing = this.smoothing) {
    this.smoothing = smoothing;
    const width = Math.max(this.plot.clientWidth, 220);
    const height = Math.round(Math.min(Math.max(width * 0.5, 190), this.large() ? 320 : 230));
    const { chart, log } = this;
    const svg = this.svg = canvas(this.plot, width, height, chart.title, chart.summary);
    const [low, high] = this.range();
    const bottom = height - 24, y = scale(low, high, bottom, 12, log);
    const ticks = log ? logTicks(low, high, 6) : linearTicks(low, high, height / 45);
    const left = 12 + 6.6 * Math.max(...ticks.map((tick) => label(tick).length), 2);
    const x = this.x = scale(0, Math.max(this.run.last, 1), left, width - 10);
    for (const tick of ticks) {
      draw(svg, "line", { x1: left, x2: width - 10, y1: y(tick), y2: y(tick), class: "grid-line" });
      draw(svg, "text", { x: left - 7, y: y(tick) + 4, "text-anchor": "end" }, label(tick));
    }
    stepAxis(svg, x, bottom);
    this.marks(svg, x, bottom);
    this.lines = chart.series.map((series, i) => this.line(svg, series, this.colours[i], x, y));
    if (chart.best) this.best(svg, x(chart.best.x), y(chart.best.y), width);
    this.cross = draw(svg, "line", { y1: 8, y2: bottom, class: "cross", visibility: "hidden" });
    this.dots = this.colours.map((fill) => draw(svg, "circle", { r: 4, fill, class: "point", visibility: "hidden" }));
    this.y = y;
    this.crosshair.listen(svg, (pixel) => x.invert((pixel / svg.clientWidth) * width));
    this.show(null);
  }

  range() {
    let values = this.numbers().filter((value) => value !== null && (!this.log || value > 0));
    if (!values.length) values = [this.log ? 0.1 : 0, 1];
    let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    if (this.log) return low < high ? [low / 1.1, high * 1.1] : [low / 2, low * 2];
    if (low >= 0 && low < 0.4 * high) low = 0;
    const margin = (high - low) * 0.04 || Math.abs(high) * 0.1 || 1;
    return [low === 0 ? 0 : low - margin, high + margin];
  }

  /** Draws a series, and returns the values that are its line. */
  line(svg, series, colour, x, y) {
    if (series.role === "validation" || series.role === "line") {
      draw(svg, "path", { d: path(series.x, series.y, x, y, this.log), class: "smooth", stroke: colour });
      if (series.x.length > (series.role === "line" ? 20 : 40)) return series.y;
      series.y.forEach((value, i) => {
        if (value === null || (this.log && value <= 0)) return;
        draw(svg, "circle", { cx: x(series.x[i]), cy: y(value), r: 3.2, fill: colour, class: "point" });
      });
      return series.y;
    }
    const line = smoothed(series.y, (this.smoothing / 100) ** 2 * 0.1 * series.y.length);
    if (series.low) draw(svg, "path", { d: band(series, x, y, this.log), class: "band", fill: colour });
    else draw(svg, "path", { d: path(series.x, series.y, x, y, this.log), class: "raw", stroke: colour });
    draw(svg, "path", { d: path(series.x, line, x, y, this.log), class: "smooth", stroke: colour });
    return line;
  }

  best(svg, x, y, width) {
    const group = draw(svg, "g");
    draw(group, "title", {}, `best model, after step ${readable(this.chart.best.x)}: ${readable(this.chart.best.y)}`);
    draw(group, "circle", { cx: x, cy: y, r: 7, class: "best" });
    const right = x > width - 60;
    const place = { x: right ? x - 12 : x + 12, y: Math.max(y - 9, 16), "text-anchor": right ? "end" : "start" };
    draw(group, "text", { ...place, class: "best-text halo" }, "best");
  }

  /** Where the run was resumed, interrupted or stopped. */
  marks(svg, x, bottom) {
    for (const mark of this.run.marks) {
      const at = Math.min(x(mark.x), x.to), kind = mark.kind === "not_finite" ? " not_finite" : "";
      const group = draw(svg, "g");
      draw(group, "title", {}, `${mark.text} after step ${readable(mark.x)}`);
      draw(group, "line", { x1: at, x2: at, y1: 8, y2: bottom, class: `mark${kind}` });
      if (!this.large() || (this.run.marks.length > 4 && !kind)) continue;
      const right = at > (x.from + x.to) / 2;
      const place = { x: right ? at - 5 : at + 5, y: 18, "text-anchor": right ? "end" : "start" };
      draw(group, "text", { ...place, class: `mark-text halo${kind}` }, mark.text);
    }
  }

  /** The values at a step, or the last ones. */
  show(step) {
    this.cross.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) for (const end of ["x1", "x2"]) this.cross.setAttribute(end, this.x(step));
    this.at.textContent = step === null ? "" : this.crosshair.place(step);
    this.chart.series.forEach((series, i) => {
      const index = step === null ? series.x.length - 1 : nearest(series.x, step);
      const value = this.lines[i][index];
      this.readouts[i].textContent = readable(value);
      const seen = step !== null && value !== null && (!this.log || value > 0);
      this.dots[i].setAttribute("visibility", seen ? "visible" : "hidden");
      if (!seen) return;
      this.dots[i].setAttribute("cx", this.x(series.x[index]));
      this.dots[i].setAttribute("cy", this.y(value));
    });
  }
}

/** One step that is pointed at in all charts: by a pointer, or by the arrow keys. */
class Crosshair {
  constructor(run) {
    Object.assign(this, { run, charts: [], step: null });
  }

  place(step) {
    const [begin, before, length] = this.run.counts.findLast(([first]) => first < step) ?? this.run.counts[0];
    const epochs = before + Math.max(1, Math.ceil((step - begin) / length));
    const epoch = length ? `, epoch ${epochs.toLocaleString("en-US")}` : "";
    return `step ${Math.round(step).toLocaleString("en-US")}${epoch}`;
  }

  listen(svg, toStep) {
    svg.onpointermove = (event) => this.move(toStep(event.clientX - svg.getBoundingClientRect().left));
    svg.onpointerleave = () => this.move(null);
    svg.onblur = () => this.move(null);
    svg.onkeydown = (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") this.move(null);
      if (!by) return;
      event.preventDefault();
      const stride = Math.max(1, Math.round(this.run.last / 100));
      this.move((this.step ?? (by > 0 ? -stride : this.run.last)) + by * stride);
    };
  }

  move(step) {
    this.step = step === null ? null : Math.round(Math.min(Math.max(step, 0), this.run.last));
    for (const chart of this.charts) chart.show(this.step);
  }
}
