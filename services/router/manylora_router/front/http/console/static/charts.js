// The last hour as areas or lines, in SVG of our own.

import { clock, h, legend, show, sum, svg } from "/console/dom.js";

const [HEIGHT, LEFT, BOTTOM, TOP, RIGHT] = [190, 52, 22, 8, 8];
const LONE = 4; // how wide one value alone is

/** The least "round" number that is no less. */
function round(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 2.5, 5, 10].find((each) => each * power >= most * 0.999) * power;
}

/**
 * A chart that can be read with the pointer and with the arrow keys.
 * series: {name, paint, values: [number or null]}, oldest first, all of one length.
 */
export class Chart {
  constructor(title, unit, { stacked = false, text }) {
    this.isStacked = stacked;
    this.title = title;
    this.unit = unit;
    this.text = text;
    this.said = h("p", { class: "said", "aria-live": "polite" });
    this.plot = svg("svg", { tabindex: 0, role: "img" });
    this.names = h("div");
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.look(null));
    this.plot.addEventListener("keydown", (event) => this.step(event));
    this.plot.addEventListener("blur", () => this.look(null));
    this.element = h("section", { class: "card chart" }, h("h2", null, title, h("span", { class: "soft" }, ` ${unit}`)), this.plot, this.said, this.names);
    this.at = null;
    this.width = 620;
    new ResizeObserver(() => this.series && this.draw()).observe(this.plot);
  }

  /** times: {ended, step, most}: of the last value, between two, and how many fit. */
  update(series, times) {
    this.series = series;
    this.length = series[0]?.values.length ?? 0;
    // What little is known of the hour is not shown at its edge.
    this.times = { ...times, most: [1 / 6, 1 / 2].map((share) => Math.round(share * times.most)).find((most) => this.length <= most) ?? times.most };
    this.draw();
    show(this.names, series.length > 1 ? legend(series) : null);
    this.look(this.at !== null && this.at < this.length ? this.at : null);
  }

  x(index) {
    const { most } = this.times;
    return LEFT + ((this.width - LEFT - RIGHT) * (most - this.length + index + 1)) / most;
  }

  y(value) {
    return HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * value) / this.top;
  }

  draw() {
    this.width = this.plot.clientWidth || this.width;
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const range = [...Array(this.length).keys()];
    const most = this.isStacked
      ? Math.max(0, ...range.map((i) => sum(this.series.map((each) => each.values[i]))))
      : Math.max(0, ...this.series.flatMap((each) => each.values.map((value) => value ?? 0)));
    this.top = round(most);
    const marks = [0, 0.5, 1].map((share) => [
      svg("line", { class: "rule", x1: LEFT, x2: this.width - RIGHT, y1: this.y(share * this.top), y2: this.y(share * this.top) }),
      svg("text", { class: "axis", x: LEFT - 6, y: this.y(share * this.top) + 4, "text-anchor": "end" }, this.text(share * this.top)),
    ]);
    const { most: steps, step, ended } = this.times;
    const hours = [0, 0.25, 0.5, 0.75, 1].map((share) =>
      svg("text", { class: "axis", x: LEFT + share * (this.width - LEFT - RIGHT), y: HEIGHT - 6, "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle" },
        clock(ended - (1 - share) * steps * step, false)));
    const unknown = this.length < steps && svg("rect", { class: "unknown", x: LEFT, y: TOP, width: this.x(0) - LEFT, height: HEIGHT - BOTTOM - TOP }, svg("title", null, "not known: before this router began"));
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    show(this.plot, unknown, marks, hours, this.isStacked ? this.areas(range) : this.lines(), this.cursor);
    this.plot.setAttribute("aria-label", this.summary());
  }

  areas(range) {
    const base = range.map(() => 0);
    // A lone value would be an area without width.
    const corners = range.length === 1 ? [[0, this.x(0) - LONE], [0, this.x(0)]] : range.map((i) => [i, this.x(i)]);
    const edge = () => corners.map(([i, x]) => `${x},${this.y(base[i])}`);
    return this.series.map((each) => {
      if (!range.length) return null;
      const lower = edge().reverse();
      for (const i of range) base[i] += each.values[i] ?? 0;
      return svg("polygon", { points: [...edge(), ...lower].join(" "), style: { fill: each.paint, "fill-opacity": "0.85" } });
    });
  }

  lines() {
    return this.series.map((each) => {
      let path = "";
      let isOpen = false;
      each.values.forEach((value, i) => {
        if (value !== null) path += `${isOpen ? "L" : "M"}${this.x(i).toFixed(1)} ${this.y(value).toFixed(1)}`;
        if (value !== null && !isOpen && (each.values[i + 1] ?? null) === null) path += "h.01";
        isOpen = value !== null;
      });
      return svg("path", { d: path, fill: "none", style: { stroke: each.paint, "stroke-width": "2", "stroke-linecap": "round", "stroke-dasharray": each.dash } });
    });
  }

  summary() {
    const last = this.length - 1;
    const now = this.series.map((each) => `${each.name} ${this.text(each.values[last] ?? null)}`).join(", ");
    return `${this.title}, ${this.unit}, last hour. ${last < 0 ? "Nothing is known yet." : `At the end: ${now}. Arrow keys read it.`}`;
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * this.width;
    const index = Math.round(((at - LEFT) / (this.width - LEFT - RIGHT)) * this.times.most) - 1 - (this.times.most - this.length);
    this.look(index >= 0 && index < this.length ? index : null);
  }

  step(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined || !this.length) return;
    event.preventDefault();
    this.look(Math.max(0, Math.min(this.length - 1, (this.at ?? this.length - 1) + move)));
  }

  look(index) {
    this.at = index;
    this.cursor?.setAttribute("visibility", index === null ? "hidden" : "visible");
    if (index === null) return show(this.said, "");
    const x = this.x(index);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
    const { ended, step } = this.times;
    const values = this.series.map((each) => `${each.name} ${this.text(each.values[index])}`);
    if (this.isStacked && this.series.length > 1) values.unshift(`all ${this.text(sum(this.series.map((each) => each.values[index])))}`);
    show(this.said, `${clock(ended - (this.length - 1 - index) * step)} — ${values.join(", ")}`);
  }
}
