// Draws each figure of the class "plot" from the JSON inside of it. Keys: arrows move the cursor, Shift
// by ten columns, Home and End to the ends, P to the peak, + and - zoom, 0 or Escape shows all.
"use strict";
(() => {
  const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
  const TICKS = [];
  for (let power = 1; power < 2 ** 50; power *= 1024)
    for (const step of [1, 2, 5, 10, 20, 50, 100, 200, 500]) TICKS.push(step * power);

  // As `show_nbytes` in units.py; ticks go without zeros behind the point.
  const bytes = (n, short) => {
    const [unit, size] = UNITS.find((one) => Math.abs(n) >= one[1]) || UNITS[3];
    const value = n / size, digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value) || 1)));
    return `${unit === "B" || short === true ? Number(value.toPrecision(3)) : value.toFixed(digits)} ${unit}`;
  };
  const time = (x, unit) => unit === "share" ? `${Math.round(100 * x)} %`
    : unit === "event" ? `event ${Math.round(x)}`
    : x >= 1 ? `${Number(x.toPrecision(3))} s` : `${Number((1000 * x).toPrecision(3))} ms`;
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const make = (tag, className, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;   // never as HTML: names come from a model
    return node;
  };

  class Chart {
    constructor(figure, top) {
      this.figure = figure;
      this.data = JSON.parse(figure.querySelector("script").textContent);
      this.top = top;
      this.box = make("div", "canvas");
      this.box.tabIndex = 0;
      this.box.setAttribute("role", "img");
      this.box.setAttribute("aria-label", `Memory over one step, ${this.data.name}; peak `
        + `${bytes(this.data.peak)}. Arrow keys move the cursor, P goes to the peak, + and - zoom.`);
      this.said = make("p", "said");
      this.said.setAttribute("aria-live", "polite");
      this.keys = make("table", "legend");
      figure.append(this.box, this.said, this.keys);
      this.show(0);
      this.box.addEventListener("keydown", (event) => this.key(event));
      new ResizeObserver(() => this.plot.setSize(this.size())).observe(this.box);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.show(this.view));
    }

    size() { return { width: Math.max(this.box.clientWidth, 200), height: 320 }; }

    show(view) {
      const { data } = this;
      this.view = view;
      const bands = data.views[view].bands;
      const sums = data.x.map(() => 0);
      const curves = bands.map((band) => band.values.map((n, i) => data.stacked ? sums[i] += n : n));
      this.curves = curves;
      this.level = data.stacked ? sums.slice() : null;
      this.peak = this.at_peak();
      // The highest sum is painted first and the next ones over it, so that each band shows its own.
      const order = data.stacked ? bands.map((_, i) => bands.length - 1 - i) : bands.map((_, i) => i);
      const stepped = uPlot.paths.stepped({ align: 1 });
      const series = order.map((i) => {
        const color = style(`--b${bands[i].color}`);
        return data.stacked
          ? { fill: color, width: 0, paths: stepped, points: { show: false } }
          : { stroke: color, fill: color + "33", width: 1.5, paths: stepped, points: { show: false } };
      });
      const rows = order.map((i) => curves[i]);
      if (data.stacked) {
        series.push({ stroke: style("--ink"), width: 1.2, paths: stepped, points: { show: false } });
        rows.push(this.level);
      }
      const soft = style("--soft"), rule = style("--rule");
      const axis = { stroke: soft, grid: { stroke: rule, width: 1 }, ticks: { show: false },
                     font: "12px system-ui, sans-serif" };
      if (this.plot) this.plot.destroy();
      this.plot = new uPlot({
        ...this.size(),
        legend: { show: false },
        cursor: { sync: { key: "step" }, drag: { x: true, y: false }, points: { show: false } },
        // Above the highest curve there is room for the names of all marks.
        scales: { x: { time: false },
                  y: { range: (_, low) => [Math.min(low, 0), this.top / (0.94 - 0.06 * data.marks.length) || 1] } },
        axes: [
          { ...axis, size: 30, values: (_, ticks) => ticks.map((x) => time(x, data.unit)) },
          { ...axis, size: 76, incrs: TICKS, values: (_, ticks) => ticks.map((n) => bytes(n, true)) },
        ],
        series: [{}, ...series],
        hooks: { draw: [(u) => this.draw(u)], setCursor: [(u) => this.tell(u.cursor.idx)] },
      }, [data.x, ...rows], this.box);
      this.legend(bands);
    }

    // The column with the highest level of all.
    at_peak() {
      const highest = this.data.x.map((_, i) => this.level ? this.level[i]
        : Math.max(...this.curves.map((curve) => curve[i])));
      return highest.indexOf(Math.max(...highest));
    }

    draw(u) {
      const { ctx, bbox } = u, ratio = devicePixelRatio || 1;
      ctx.save();
      ctx.font = `${12 * ratio}px system-ui, sans-serif`;
      const ink = style("--ink");
      this.data.marks.forEach((mark) => {
        const x = u.valToPos(mark.x, "x", true);
        if (x < bbox.left || x > bbox.left + bbox.width) return;
        ctx.strokeStyle = mark.color < 0 ? ink : style(`--b${mark.color}`);
        ctx.lineWidth = ratio;
        ctx.setLineDash([4 * ratio, 4 * ratio]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      });
      this.data.marks.forEach((mark, nth) => {   // over all lines
        const x = u.valToPos(mark.x, "x", true);
        if (x < bbox.left || x > bbox.left + bbox.width) return;
        this.text(ctx, mark.name, x, bbox.top + (13 + 16 * nth) * ratio, bbox, ratio);
      });
      if (this.level) {
        const x = u.valToPos(this.data.x[this.peak], "x", true);
        const y = u.valToPos(this.level[this.peak], "y", true);
        if (x >= bbox.left && x <= bbox.left + bbox.width) {
          ctx.fillStyle = ink;
          ctx.beginPath();
          ctx.arc(x, y, 3.5 * ratio, 0, 2 * Math.PI);
          ctx.fill();
        }
      }
      ctx.restore();
    }

    text(ctx, words, x, y, bbox, ratio) {
      const right = x + ctx.measureText(words).width + 10 * ratio > bbox.left + bbox.width;
      ctx.textAlign = right ? "right" : "left";
      ctx.setLineDash([]);
      ctx.lineWidth = 4 * ratio;
      ctx.strokeStyle = style("--card");
      ctx.fillStyle = style("--ink");
      ctx.strokeText(words, x + (right ? -6 : 6) * ratio, y);
      ctx.fillText(words, x + (right ? -6 : 6) * ratio, y);
    }

    legend(bands) {
      const head = make("tr");
      head.append(make("th", "", ""), this.where = make("th", "n"),
                  make("th", "n", this.data.stacked ? "at most" : "own peak"));
      const rows = bands.map((band) => {
        const row = make("tr"), name = make("td"), swatch = make("i");
        swatch.style.background = `var(--b${band.color})`;
        name.append(swatch, band.name);
        row.append(name, make("td", "n"), make("td", "n", bytes(band.most)));
        return row;
      });
      this.cells = rows.map((row) => row.children[1]);
      if (this.data.stacked) {
        const row = make("tr", "sum");
        row.append(make("td", "", "all"), make("td", "n"), make("td", "n", bytes(this.data.peak)));
        this.cells.push(row.children[1]);
        rows.unshift(row);
        rows.splice(1, rows.length - 1, ...rows.slice(1).reverse());   // as they lie in the picture
      }
      this.keys.replaceChildren(head, ...rows);
      this.tell(null);
    }

    tell(index) {
      if (!this.cells) return;
      const at = index ?? this.peak;
      const bands = this.data.views[this.view].bands;
      const values = bands.map((band) => band.values[at]);
      if (this.data.stacked) values.push(this.level[at]);
      values.forEach((n, i) => { this.cells[i].textContent = bytes(n ?? 0); });
      const highest = bands[values.indexOf(Math.max(...values))];
      const peak = this.data.stacked ? "at the peak" : `at the peak of ${highest.name}`;
      this.where.textContent = index === null || index === undefined
        ? peak : `at ${time(this.data.x[at], this.data.unit)}`;
    }

    key(event) {
      const u = this.plot, last = this.data.x.length - 1;
      const now = u.cursor.idx ?? this.peak, far = event.shiftKey ? 10 : 1;
      const targets = { ArrowRight: now + far, ArrowLeft: now - far, Home: 0, End: last,
                        p: this.peak, P: this.peak };
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key in targets) this.move(Math.min(Math.max(targets[event.key], 0), last));
      else if (event.key === "+" || event.key === "=") this.zoom(0.5, now);
      else if (event.key === "-") this.zoom(2, now);
      else if (event.key === "0" || event.key === "Escape") this.zoom(Infinity, now);
      else return;
      event.preventDefault();
    }

    move(index) {
      const u = this.plot, x = this.data.x[index];
      if (x < u.scales.x.min || x > u.scales.x.max) this.zoom(1, index);
      else this.place(index);
      const value = this.level ? this.level[index] : this.curves[0][index];
      this.said.textContent = `${time(x, this.data.unit)}: ${bytes(value)}`;
    }

    place(index) {
      const u = this.plot;
      const value = this.level ? this.level[index] : this.curves[0][index];
      u.setCursor({ left: u.valToPos(this.data.x[index], "x"), top: u.valToPos(value, "y") }, true, true);
      this.tell(index);
    }

    zoom(factor, index) {
      const u = this.plot, all = this.data.x, last = all[all.length - 1];
      const wide = Math.min((u.scales.x.max - u.scales.x.min) * factor, last - all[0]);
      const low = Math.min(Math.max(all[index] - wide / 2, all[0]), last - wide);
      for (const chart of charts) chart.plot.setScale("x", { min: low, max: low + wide });
      queueMicrotask(() => this.place(index));   // after uPlot has moved its scales
    }
  }

  const figures = [...document.querySelectorAll("figure.plot")];
  const tops = figures.map((figure) => JSON.parse(figure.querySelector("script").textContent).peak);
  const charts = figures.map((figure) => new Chart(figure, Math.max(...tops)));
  for (const button of document.querySelectorAll("button[data-view]"))
    button.addEventListener("click", () => {
      for (const one of document.querySelectorAll("button[data-view]"))
        one.setAttribute("aria-pressed", String(one === button));
      charts.forEach((chart) => chart.show(Number(button.dataset.view)));
    });
  window.elbowroom = { charts };   // the figures behind the picture
})();
