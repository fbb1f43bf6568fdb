// The page is complete without this script; it only answers to pointer, keys and buttons. Texts are set as text.
"use strict";

function data(element) {
  return JSON.parse(element.querySelector("script[type='application/json']").textContent);
}

// the next place in a circle; the first step goes to one of the ends
function along(place, step, count) {
  return place < 0 ? (step > 0 ? 0 : count - 1) : (place + step + count) % count;
}

function make(name, text) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  return element;
}

// -- light, dark, or as the system says --
const theme = document.getElementById("theme");
const themes = ["system", "light", "dark"];
theme.addEventListener("click", () => {
  const next = themes[(themes.indexOf(theme.dataset.now) + 1) % themes.length];
  theme.dataset.now = next;
  theme.textContent = "colours: " + next;
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
});

// -- one of several buttons --
function choose(group, act) {
  const buttons = [...group.querySelectorAll("button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      act(button.value);
    });
  }
}

// -- the architecture --
for (const drawing of document.querySelectorAll(".drawing")) {
  const parts = data(drawing);
  const blocks = [...drawing.querySelectorAll(".block")];
  const details = drawing.querySelector(".details");
  const show = (index) => {
    for (const block of blocks) block.removeAttribute("data-chosen");
    blocks[index].setAttribute("data-chosen", "");
    const list = make("dl");
    for (const [name, value] of parts[index].details) {
      const pair = make("div");
      pair.append(make("dt", name), make("dd", value));
      list.append(pair);
    }
    details.replaceChildren(make("h4", parts[index].name), list);
  };
  blocks.forEach((block, index) => {
    for (const event of ["pointerenter", "focus", "click"]) block.addEventListener(event, () => show(index));
  });
  choose(drawing.querySelector(".choices"), (what) => {
    blocks.forEach((block, index) => {
      block.querySelector(".shape").style.setProperty("--high", parts[index].heights[what]);
    });
  });
}

// -- lines over epochs --
for (const chart of document.querySelectorAll(".chart")) {
  const told = data(chart);
  const svg = chart.querySelector("svg");
  const plot = chart.querySelector(".plot");
  const readout = chart.querySelector(".readout");
  const cursor = svg.querySelector(".cursor");
  const spot = svg.querySelector(".spot");
  const lines = [...svg.querySelectorAll(".line")];
  const shown = (index) => !lines[index].parentNode.hasAttribute("hidden");
  const epochs = [...new Set(told.lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
  const unit = told.unit ? " " + told.unit : "";
  let place = -1;

  const mark = (x) => {
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.style.visibility = "visible";
  };
  // few lines: all values of the epoch; many: the line that is nearest
  const at = (epoch) => {
    const values = [];
    told.lines.forEach((line, index) => {
      const point = line.points.find((candidate) => candidate[0] === epoch);
      if (point && shown(index)) {
        values.push(line.label + " " + point[1] + unit);
        mark(point[2]);
      }
    });
    readout.textContent = told.xLabel + " " + epoch + ": " + values.join(", ");
  };
  const light = (index, point) => {
    lines.forEach((line, other) => line.classList.toggle("lit", other === index));
    spot.setAttribute("cx", point[2]);
    spot.setAttribute("cy", point[3]);
    spot.style.visibility = "visible";
    readout.textContent = told.lines[index].label + ", " + told.xLabel + " " + point[0] + ": " + point[1] + unit;
  };
  plot.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const x = ((event.clientX - frame.left) / frame.width) * 360;
    const y = ((event.clientY - frame.top) / frame.height) * 216;
    let best = null;
    told.lines.forEach((line, index) => {
      if (!shown(index)) return;
      for (const point of line.points) {
        const far = told.thin ? Math.hypot(point[2] - x, point[3] - y) : Math.abs(point[2] - x);
        if (!best || far < best.far) best = { far, index, point };
      }
    });
    if (!best) return;
    if (told.thin) light(best.index, best.point);
    else at(best.point[0]);
  });
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    if (told.thin) {
      const visible = told.lines.map((_, index) => index).filter(shown);
      place = along(place, step, visible.length);
      light(visible[place], told.lines[visible[place]].points.at(-1));
    } else {
      place = Math.min(Math.max(place + step, 0), epochs.length - 1);
      at(epochs[place]);
    }
  });
  for (const button of chart.querySelectorAll(".choices button")) {
    button.addEventListener("click", () => {
      const pressed = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(pressed));
      for (const group of svg.querySelectorAll("g[data-legend='" + button.value + "']")) {
        group.toggleAttribute("hidden", !pressed);
      }
    });
  }
}

// -- points that can be told apart by pointing at them: runs, and cells of a confusion matrix --
for (const field of document.querySelectorAll(".spots")) {
  const texts = data(field);
  const spots = [...field.querySelectorAll("[data-spot]")];
  const frame = field.querySelector("rect.spot");
  const readout = field.querySelector(".readout");
  let place = -1;
  const show = (index) => {
    place = index;
    readout.textContent = texts[index];
    if (frame) for (const name of ["x", "y"]) frame.setAttribute(name, spots[index].getAttribute(name));
    if (frame) frame.style.visibility = "visible";
  };
  spots.forEach((spot, index) => spot.addEventListener("pointerenter", () => show(index)));
  field.querySelector("[tabindex]").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show(along(place, step, spots.length));
  });
}

// -- class activation maps over the mistakes --
for (const group of document.querySelectorAll(".maps")) {
  const mistakes = group.parentNode.querySelector(".mistakes");
  choose(group, (which) => { mistakes.dataset.maps = which; });
}
