// The report's charts and switches. It uses only data in the page and makes no request.
"use strict";
(() => {
  const report = JSON.parse(document.getElementById("report-data").textContent);
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 560px)");
  const touch = matchMedia("(pointer: coarse)");
  const AXES = { epoch: "epochs", samples: "training samples", seconds: "seconds" };
  const PARTS = { train: "training", validation: "validation" };
  const hidden = new Set();
  const chosen = (name, otherwise) => document.querySelector(`input[name="${name}"]:checked`)?.value ?? otherwise;
  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  // "@c0" in a figure stands for the color of that name in the palette.
  const painted = (part) => {
    if (typeof part === "string") return part.startsWith("@") ? color(part.slice(1)) : part;
    if (Array.isArray(part)) return part.map(painted);
    if (part === null || typeof part !== "object") return part;
    return Object.fromEntries(Object.entries(part).map(([key, value]) => [key, painted(value)]));
  };

  const look = () => {
    const axis = {
      gridcolor: color("grid"), zerolinecolor: color("grid"), linecolor: color("edge"), tickcolor: color("edge"),
      automargin: true, title: { standoff: 10, font: { size: 12, color: color("quiet") } },
    };
    return {
      layout: {
        font: { family: color("sans"), size: 12, color: color("ink") },
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        margin: { l: 54, r: 22, t: 12, b: 44 }, xaxis: axis, yaxis: axis,
        hoverlabel: { bgcolor: color("surface"), bordercolor: color("edge"), font: { color: color("ink") }, align: "left" },
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", font: { size: 11.5 } },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: color("quiet"), activecolor: color("accent") },
        dragmode: touch.matches ? false : "zoom", separators: ".,",
      },
    };
  };

  // The curves of the visible lines; the loss is that of training and of validation.
  const curve = (chart) => {
    const axis = chosen("axis", "epoch");
    const name = chosen(chart.choice, chart.value);
    const parts = chart.part === "train" && name === "loss" ? ["train", "validation"] : [chart.part];
    const style = (part, both) => ({ width: part === "train" && both ? 1.1 : report.lines.length > 8 ? 1.6 : 2.2 });
    const both = parts.length > 1;
    const data = [];
    report.lines.forEach((line, place) => parts.forEach((part) => {
      const y = line[part].values[name];
      if (!y || hidden.has(String(place))) return;
      const x = line[part].at[axis];
      const ink = color("c" + line.color);
      if (line[part].low?.[name]) {
        data.push({
          type: "scatter", mode: "lines", x: [...x, ...[...x].reverse()],
          y: [...line[part].high[name], ...[...line[part].low[name]].reverse()],
          fill: "toself", fillcolor: ink, opacity: 0.16, line: { width: 0 }, hoverinfo: "skip", showlegend: false,
        });
      }
      const marked = part === "validation" && y.length <= 60;
      data.push({
        type: "scatter", mode: marked ? "lines+markers" : "lines", x, y, name: line.label, showlegend: false,
        line: { color: ink, dash: line.dash, ...style(part, both) },
        marker: { symbol: line.symbol, size: y.length > 1 ? 5.5 : 11 },  // a single point needs a larger marker
        hovertemplate: `${line.shown}${both ? `, ${PARTS[part]}` : ""}<br>${AXES[axis]}: %{x:,.4~g}<br><b>%{y:.5~g}</b><extra></extra>`,
      });
    }));
    const values = data.flatMap((trace) => trace.y).filter((value) => value !== null).sort((a, b) => a - b);
    const spread = values[0] > 0 && values.at(-1) > 100 * values[values.length >> 1];  // a peak that hides all else
    const log = name === "loss_scale" || name === "loss" && spread;
    // The legend tells the parts apart; the lines have a legend of their own, above the charts.
    for (const part of both ? parts : []) {
      data.push({
        type: "scatter", x: [null], y: [null], name: PARTS[part], showlegend: true,
        mode: part === "validation" ? "lines+markers" : "lines", line: { color: color("quiet"), ...style(part, both) },
      });
    }
    return {
      data,
      layout: {
        xaxis: { title: { text: AXES[axis] }, rangemode: "tozero" },
        yaxis: { title: { text: (report.names[name] ?? name) + (log ? " (log scale)" : "") }, type: log ? "log" : "linear" },
        showlegend: both, legend: { itemclick: false, itemdoubleclick: false }, hovermode: "closest", uirevision: axis + name,
      },
    };
  };

  // Labels with one setting per line on narrow screens.
  const broken = (trace) => trace.orientation === "h" && narrow.matches
    ? { ...trace, y: trace.y.map((label) => label.replaceAll(" · ", "<br>")) } : trace;

  // plotly.js is stored as gzip in Python's base85. As an inline script it must match a hash of the page's policy.
  const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~";
  const unpack = async () => {
    const packed = document.getElementById("plotly");
    const text = packed.textContent;
    const bytes = new DataView(new ArrayBuffer(text.length / 5 * 4));
    for (let at = 0; at < text.length; at += 5) {
      let number = 0;
      for (const digit of text.slice(at, at + 5)) number = number * 85 + DIGITS.indexOf(digit);
      bytes.setUint32(at / 5 * 4, number);
    }
    const stream = new Blob([bytes.buffer.slice(0, Number(packed.dataset.bytes))]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  };
  const plotly = unpack().catch(() => {
    for (const div of document.querySelectorAll(".chart")) div.textContent = "This browser cannot draw the figures; update it.";
  });

  let drawn = 0;
  const draw = async (div) => {
    await plotly;
    if (!window.Plotly) return;
    const chart = report.charts[div.dataset.chart];
    const figure = chart.part ? curve(chart) : { data: painted(chart.data).map(broken), layout: painted(chart.layout) };
    const tall = narrow.matches && figure.data[0]?.orientation === "h" ? 52 * figure.data[0].y.length + 110 + 20 * figure.data.length : 0;
    div.dataset.height ??= parseInt(div.style.height, 10);
    div.style.height = `${Math.max(tall, Number(div.dataset.height))}px`;
    const layout = { ...figure.layout, template: look(), height: div.clientHeight, autosize: true };
    if (root.classList.contains("paper")) layout.width = div.clientWidth;  // plotly does not measure paper
    await Plotly.react(div, figure.data, layout, {
      displaylogo: false, responsive: true, displayModeBar: touch.matches ? false : "hover",
      modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]],  // plotly's own list has an upload
      plotlyServerURL: "",
      toImageButtonOptions: { filename: div.dataset.chart, scale: 2 },
    });
    if (!div.dataset.drawn) drawn += 1;
    div.dataset.drawn = "true";
  };
  const charts = [...document.querySelectorAll("[data-chart]")];
  const redraw = (which) => Promise.all(charts.filter(which).map(draw));
  const isCurve = (div) => Boolean(report.charts[div.dataset.chart].part);

  // Switches.
  for (const input of document.querySelectorAll(".controls input")) {
    input.addEventListener("change", () => redraw(isCurve));
  }
  const boxes = [...document.querySelectorAll('input[name="line"]')];
  const show = () => {
    hidden.clear();
    for (const box of boxes) if (!box.checked) hidden.add(box.value);
    redraw(isCurve);
  };
  for (const box of boxes) box.addEventListener("change", show);
  for (const button of document.querySelectorAll("[data-lines]")) {
    button.addEventListener("click", () => {
      for (const box of boxes) box.checked = button.dataset.lines === "all";
      show();
    });
  }

  // The tables: sorting, and search in that of the runs.
  const order = (row, column) => row.cells[column].dataset.order ?? row.cells[column].textContent;
  for (const table of document.querySelectorAll(".sortable")) {
    const rows = [...table.tBodies[0].rows];
    [...table.tHead.rows[0].cells].forEach((head, column, heads) => {
      head.querySelector("button").addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const compare = (one, two) => {
          const [a, b] = [order(one, column), order(two, column)];
          if (a === "" || b === "") return (a === "") - (b === "");  // unknown values come last in either order
          const by = isNaN(a) || isNaN(b) ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
          return up ? by : -by;
        };
        table.tBodies[0].append(...rows.sort(compare));
      });
    });
  }
  document.getElementById("filter")?.addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...document.getElementById("all-runs").tBodies[0].rows];
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    document.getElementById("found").textContent = words.length ? `${rows.filter((row) => !row.hidden).length} found` : "";
  });

  for (const button of document.querySelectorAll("[data-copies]")) {
    button.addEventListener("click", async () => {
      const source = document.getElementById(button.dataset.copies);
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "Copied";
        document.getElementById("status").textContent = "Commands copied";
        setTimeout(() => { button.textContent = "Copy"; }, 2000);
      } catch {
        getSelection().selectAllChildren(source);  // a page opened from a file may not write to the clipboard
      }
    });
  }

  // What is cut off at the side says so, until it has been scrolled to the end.
  const hint = (box) => {
    box.classList.toggle("more", box.scrollWidth - box.clientWidth - box.scrollLeft > 8);
  };
  const sizes = new ResizeObserver((entries) => { for (const entry of entries) hint(entry.target.closest(".scroll")); });
  for (const box of document.querySelectorAll(".scroll")) {
    const note = document.createElement("p");
    note.className = "hint";
    note.textContent = "scroll sideways for more \u2192";
    note.setAttribute("aria-hidden", "true");
    box.before(note);
    box.addEventListener("scroll", () => hint(box), { passive: true });
    sizes.observe(box);
    if (box.firstElementChild) sizes.observe(box.firstElementChild);
  }

  // Color scheme, width, printing.
  dark.addEventListener("change", () => redraw(() => true));
  narrow.addEventListener("change", () => redraw(() => true));
  addEventListener("beforeprint", () => { root.classList.add("paper"); redraw(() => true); });
  addEventListener("afterprint", () => { root.classList.remove("paper"); redraw(() => true); });

  // Until all charts are drawn an open frame delays the page's load event, which a screenshot or a print waits for.
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.hidden = true;
  frame.contentDocument.open();
  redraw(() => true).finally(() => { frame.remove(); root.dataset.ready = String(drawn); });
})();
