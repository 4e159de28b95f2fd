"use strict";
(() => {
  const specifications = JSON.parse(document.getElementById("figures").textContent);
  const style = () => getComputedStyle(document.documentElement);

  // Colours are variables of the style, so that light and dark pages have their own.
  const resolved = (value, css) => {
    if (typeof value === "string") {
      return value.startsWith("var(") ? css.getPropertyValue(value.slice(4, -1)).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => resolved(item, css));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolved(item, css)]));
    }
    return value;
  };

  const draw = () => {
    const css = style();
    for (const [name, specification] of Object.entries(specifications)) {
      const plot = document.getElementById(`plot-${name}`);
      const { data, layout } = resolved(specification, css);
      layout.font.family = css.getPropertyValue("--font").trim();
      plot.closest("figure").classList.add("drawn");
      Plotly.react(plot, data, layout, { displayModeBar: false, responsive: true, plotlyServerURL: "" });
    }
    // What plotly measures texts with is nothing to be read out.
    document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true");
    document.documentElement.dataset.drawn = "yes";
  };

  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
