(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const colours = () => {
    const style = getComputedStyle(document.documentElement);
    return { ink: style.getPropertyValue("--ink"), line: style.getPropertyValue("--line") };
  };
  const narrow = () => window.innerWidth < 600;
  const layout = (figure) => {
    const { ink, line } = colours();
    const made = JSON.parse(JSON.stringify(figure.layout));
    made.paper_bgcolor = made.plot_bgcolor = "rgba(0,0,0,0)";
    made.font = { ...(made.font || {}), color: ink, size: narrow() ? 11 : 12 };
    for (const name of Object.keys(made)) {
      if (/^[xy]axis/.test(name)) made[name] = { ...made[name], gridcolor: line, zerolinecolor: line, linecolor: line };
    }
    return made;
  };
  const draw = () => figures.forEach((figure, at) =>
    Plotly.react(`chart-${at}`, figure.data, layout(figure), { responsive: true, displayModeBar: false }));
  if (figures.length) {
    draw();
    dark.addEventListener("change", draw);
  }
})();
