"use strict";
// Plots as SVG. In: an element of the page, the data, and a sentence for screen readers. The style sheet sets colours and
// dashes, so that dark mode needs nothing here. A plot is redrawn when its element is resized.

const MARGIN = {left: 48, right: 14, above: 20, below: 38};
// Minimum CSS pixels between two labels of an axis.
const APART = {x: 52, y: 34};
// With more points than this, a line has smaller marks, which would touch otherwise.
const MARKED = 80;

const drawn = new Map();  // by element: the function that draws its plot
const resized = new ResizeObserver(entries => { for (const one of entries) redraw(one.target); });

function redraw(place) {
  const draw = drawn.get(place);
  if (draw && place.clientWidth) draw();
}

// Draw now and whenever the element is resized.
function keep(place, draw) {
  if (!drawn.has(place)) resized.observe(place);
  drawn.set(place, draw);
  redraw(place);
}

function element(name, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

// Show a sentence in place of a plot: when it will appear.
function drawNothing(place, sentence) {
  drawn.delete(place);
  resized.unobserve(place);
  const said = document.createElement("p");
  said.className = "empty";
  said.textContent = sentence;
  place.replaceChildren(said);
  legend(place, []);
}

// Labels of an axis from low to high: at most about `most`, at least one unit apart.
function steps(low, high, most, unit) {
  const each = Math.max((high - low) / Math.max(1, most), unit * .999);
  const power = 10 ** Math.floor(Math.log10(each));
  const size = power * [1, 2, 5, 10].find(n => power * n >= each);
  const found = [];
  for (let n = Math.ceil(low / size - 1e-9); n * size <= high + size * 1e-9; n++) found.push(n * size);
  return found;
}

// Each of entries: [classes, label, shape (line, bar or mark)].
function legend(place, entries) {
  const before = place.previousElementSibling;
  if (before && before.classList.contains("legend")) before.remove();
  if (entries.length < 2) return;
  const list = document.createElement("ul");
  list.className = "legend";
  for (const [kind, text, shape] of entries) {
    const sample = element("svg", {width: 26, height: 12, "aria-hidden": "true"});
    if (shape === "line") sample.append(element("line", {class: `line ${kind}`, x1: 0, x2: 26, y1: 6, y2: 6}));
    else if (shape === "bar") sample.append(element("rect", {class: `bar ${kind}`, x: 7, width: 12, y: 0, height: 12}));
    else sample.append(element("circle", {class: `mark ${kind}`, cx: 13, cy: 6, r: 4}));
    const entry = document.createElement("li");
    entry.append(sample, text);
    list.append(entry);
  }
  place.before(list);
}

// Axes and grid. first, last: ends of the x axis. Its labels are whole numbers, or names[number] if names is given.
// format(value) gives the text of a y label; format.unit is the smallest difference that it shows.
function axes(place, {said, first, last, names, label, top, format}) {
  const width = place.clientWidth, height = place.clientHeight;
  const right = width - MARGIN.right, bottom = height - MARGIN.below;
  const x = at => first === last ? (MARGIN.left + right) / 2
    : MARGIN.left + (at - first) / (last - first) * (right - MARGIN.left);
  const y = value => bottom - Math.min(value, top) / top * (bottom - MARGIN.above);
  const picture = element("svg", {width, height, role: "img", "aria-label": said});
  for (const value of steps(0, top, (bottom - MARGIN.above) / APART.y, format.unit)) {
    picture.append(element("line", {class: "grid", x1: MARGIN.left, x2: right, y1: y(value), y2: y(value)}),
      element("text", {x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end"}, format(value)));
  }
  for (const at of steps(Math.ceil(first), last, (right - MARGIN.left) / APART.x, 1)) {
    picture.append(element("text", {x: x(at), y: bottom + 16, "text-anchor": "middle"}, names ? names[at] : at));
  }
  picture.append(element("text", {x: (MARGIN.left + right) / 2, y: height - 4, "text-anchor": "middle"}, label));
  return {picture, x, y, right, bottom};
}

// The top of an axis: above the largest value, so that the highest mark does not touch the edge.
function above(values, least, most = Infinity) {
  const largest = Math.max(least, ...values);
  return Math.min(most, Math.max(least, largest * 1.08));
}

function titled(shape, text) {
  shape.append(element("title", {}, text));
  return shape;
}

// points: [{x, about}]; lines: [{values, kind, name}], unknown values are null; swaps: [{x, text}].
function drawLines(place, {said, points, lines, swaps, label, format, least = 0, most}) {
  const values = lines.flatMap(line => line.values.filter(value => value !== null));
  legend(place, lines.map(line => [line.kind, line.name, "line"]));
  keep(place, () => {
    const first = points[0].x, last = points[points.length - 1].x;
    const {picture, x, y, right, bottom} = axes(place, {said, first, last, label, top: above(values, least, most) || 1, format});
    let free = -Infinity;  // right end of the last label
    for (const swap of swaps) {
      const at = Math.max(MARGIN.left, x(swap.x));
      picture.append(element("line", {class: "swap", x1: at, x2: at, y1: MARGIN.above - 4, y2: bottom}));
      const wide = 7 * swap.text.length;
      if (at - wide / 2 > free) {
        const anchor = at + wide / 2 > right ? "end" : "middle";
        picture.append(element("text", {x: at, y: MARGIN.above - 7, "text-anchor": anchor}, swap.text));
        free = at + wide / 2 + 4;
      }
    }
    for (const {values: line, kind, name} of lines) {
      let path = "";
      line.forEach((value, i) => {
        if (value !== null) path += `${path === "" || line[i - 1] === null ? "M" : "L"}${x(points[i].x).toFixed(1)} ${y(value).toFixed(1)}`;
      });
      picture.append(element("path", {class: `line ${kind}`, d: path}));
      line.forEach((value, i) => {
        if (value === null) return;
        const lone = line[i - 1] == null && line[i + 1] == null;
        const mark = element("circle", {class: `mark ${kind}`, cx: x(points[i].x), cy: y(value),
          r: points.length > MARKED && !lone ? 1.5 : 3});
        picture.append(titled(mark, `${points[i].about}\n${name}: ${format(value)}`));
      });
    }
    place.replaceChildren(picture);
  });
}

// bars: [{name, value, about, weight}]. weight is the opacity, low for uncertain values; unknown values are null.
function drawBars(place, {said, bars, label, format, most, kind = "one"}) {
  legend(place, []);
  keep(place, () => {
    const top = above(bars.map(bar => bar.value || 0), 0, most) || 1;
    const names = bars.map(bar => bar.name);
    const {picture, x, y, right, bottom} = axes(place, {said, first: -.5, last: bars.length - .5, names, label, top, format});
    const wide = Math.min(46, .7 * (right - MARGIN.left) / bars.length);
    bars.forEach((bar, i) => {
      if (bar.value === null) return;
      const shape = element("rect", {class: `bar ${kind}`, x: x(i) - wide / 2, width: wide, y: y(bar.value),
        height: Math.max(1, bottom - y(bar.value)), opacity: bar.weight ?? 1});
      picture.append(titled(shape, bar.about));
    });
    place.replaceChildren(picture);
  });
}

// rows: [{name, before, after, about}]; before and after: {mean, low, high}, drawn side by side.
function drawIntervals(place, {said, rows, label, format, most}) {
  legend(place, [["before", "the draft in use until then", "mark"], ["after", "the adapter; lines: 95% intervals", "mark"]]);
  keep(place, () => {
    const top = above(rows.flatMap(row => [row.before.high, row.after.high]), 0, most) || 1;
    const names = rows.map(row => row.name);
    const {picture, x, y} = axes(place, {said, first: -.5, last: rows.length - .5, names, label, top, format});
    rows.forEach((row, i) => {
      for (const [kind, aside] of [["before", -6], ["after", 6]]) {
        const {mean, low, high} = row[kind], at = x(i) + aside;
        picture.append(element("line", {class: `interval ${kind}`, x1: at, x2: at, y1: y(Math.max(0, low)), y2: y(high)}),
          titled(element("circle", {class: `mark ${kind}`, cx: at, cy: y(mean), r: 4}), row.about));
      }
    });
    place.replaceChildren(picture);
  });
}
