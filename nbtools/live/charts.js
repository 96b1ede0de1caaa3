// The charts of a page: values at the pointer's place; drag to zoom, double click back; a click on the legend hides a
// curve. What is written is text, never markup. Escape empties a field, which its kernel fills with the value in effect.
(() => {
  if (window.nbtoolsCharts) return; // one for all views of a page
  window.nbtoolsCharts = true;
  const [WIDTH, HEIGHT] = [2000, 10000];
  let [at, pressed, from] = [null, 0, null]; // pointer; when a chart was pressed; share of its width where a drag began
  const part = (parent, name, words = '', look = '', style = '') =>
    parent.appendChild(Object.assign(document.createElement(name), { textContent: words, className: look, style }));
  const digits = (value, count = value < 1 && value >= 0.9995 ? 4 : 3) => // 0.9996 is not 1
    String(Math.abs(value) >= 999.5 ? Math.round(value) : Number(value.toPrecision(count)));
  const lines = (plot) => [...plot.querySelectorAll('g:not(.nbt-off) > polyline:not(.nbt-faint)')];
  const value = ({ dataset: { low, high, log } }, y, height = 1 - y / HEIGHT) =>
    log === undefined ? Number(low) + height * (high - low) : low * (high / low) ** height;
  const seen = (plot) => plot.querySelector('svg').viewBox.baseVal;
  const along = (plot, share, { first, last } = plot.closest('.nbt-grid').dataset) =>
    Number(first) + ((seen(plot).x + share * seen(plot).width) / WIDTH) * (last - first);
  const share = (plot, x, { left, width } = plot.getBoundingClientRect()) => Math.min(Math.max((x - left) / width, 0), 1);
  const stateOf = (grid) => {
    const place = grid.closest('.nbt').parentElement; // the same for all frames, each of which is drawn on anew
    if (place.nbtools) return place.nbtools;
    new MutationObserver(() => place.querySelectorAll('.nbt-grid').forEach(apply)).observe(place, { childList: true });
    return (place.nbtools = { zoom: null, hidden: new Set() }); // zoom: [first, last, x axis]
  };
  const apply = (grid) => {
    const { zoom, hidden } = stateOf(grid);
    grid.innerHTML = grid.plain ??= grid.innerHTML;
    for (const each of grid.querySelectorAll('[data-name]')) each.classList.toggle('nbt-off', hidden.has(each.dataset.name));
    if (zoom?.[2] === grid.dataset.x) grid.querySelectorAll('.nbt-plot').forEach((plot) => stretch(grid, plot, zoom));
    show();
  };
  const stretch = ({ dataset }, plot, [first, last]) => {
    const [left, right] = [first, last].map((x) => ((x - dataset.first) / (dataset.last - dataset.first)) * WIDTH);
    const points = lines(plot).flatMap((line) => [...line.points].filter(({ x }) => x >= left && x <= right));
    const ys = points.length ? points.map(({ y }) => y) : [0, HEIGHT];
    const [top, bottom] = [Math.max(Math.min(...ys) - 200, 0), Math.min(Math.max(...ys) + 200, HEIGHT)];
    plot.querySelector('svg').setAttribute('viewBox', `${left} ${top} ${right - left} ${bottom - top}`);
    plot.classList.add('nbt-zoom');
    plot.querySelectorAll('.nbt-x, .nbt-y').forEach((old) => old.remove());
    for (const k of [0.1, 0.5, 0.9]) {
      part(plot, 'span', digits(first + k * (last - first)), 'nbt-x', `left: ${100 * k}%`);
      part(plot, 'span', digits(value(plot, top + k * (bottom - top))), 'nbt-y', `top: ${100 * k}%`);
    }
  };
  const write = (plot, place, where) => {
    if (!lines(plot).length) return; // metrics before the first evaluation
    const rule = part(plot, 'div', '', place > 0.5 ? 'nbt-at nbt-left' : 'nbt-at', `left: ${100 * place}%`);
    const values = part(rule, 'div', where);
    for (const line of lines(plot)) {
      const off = (point) => Math.abs(point.x - seen(plot).x - place * seen(plot).width);
      const row = part(values, 'div');
      part(row, 'i').style.background = line.getAttribute('stroke');
      if (lines(plot).length > 1) part(row, 'span', `${line.parentElement.dataset.name} `);
      part(row, 'b', digits(value(plot, [...line.points].reduce((a, b) => (off(b) < off(a) ? b : a)).y)));
    }
  };
  const show = () => {
    document.querySelectorAll('.nbt-at, .nbt-drag').forEach((old) => old.remove());
    const under = at && document.elementFromPoint(...at)?.closest('.nbt-plot');
    if (!under) return;
    const [grid, place] = [under.closest('.nbt-grid'), share(under, at[0])];
    const [x] = [along(under, place), stateOf(grid)]; // which watches for frames
    const where = `${grid.dataset.x} ${digits(grid.dataset.x === 'minutes' ? x : Math.round(x))}`;
    for (const plot of grid.querySelectorAll('.nbt-plot')) {
      write(plot, place, plot === under ? where : '');
      const [left, width] = [Math.min(from, place), Math.abs(from - place)].map((each) => `${100 * each}%`);
      if (from !== null) part(plot, 'div', '', 'nbt-drag', `left: ${left}; width: ${width}`);
    }
  };
  const zoom = (plot, ends, grid = plot.closest('.nbt-grid')) => {
    stateOf(grid).zoom = ends && [...ends.map((end) => along(plot, end)), grid.dataset.x];
    apply(grid);
  };
  const on = (kind, css, act) => document.addEventListener(kind, (event) => act(event.target.closest?.(css), event), true);
  on('pointermove', '.nbt-plot', (plot, event) => {
    if ((at = plot ? [event.clientX, event.clientY] : null) || document.querySelector('.nbt-at')) show();
  });
  on('pointerdown', '.nbt-plot', (plot, event) => { // no click, which is lost where a frame comes before its end
    from = plot && !event.button ? share(plot, event.clientX) : null;
    if (plot && event.timeStamp - pressed < 400) zoom(plot, null);
    pressed = plot ? event.timeStamp : 0;
  });
  on('pointerup', '.nbt-plot', (plot, event) => {
    const ends = plot && from !== null ? [from, share(plot, event.clientX)].sort((a, b) => a - b) : [0, 0];
    from = null;
    if (ends[1] - ends[0] > 0.02) zoom(plot, ends);
  });
  on('pointerdown', '.nbt-key span', (key, event, grid = key?.closest('.nbt-grid')) => {
    if (grid && !stateOf(grid).hidden.delete(key.dataset.name)) stateOf(grid).hidden.add(key.dataset.name);
    if (grid) apply(grid);
  });
  on('toggle', '.nbt-log > details', (fold, event, place = fold?.closest('.nbt').parentElement) => {
    const again = () => (place.querySelector('.nbt-log > details').open = place.open);
    if (place && !('open' in place)) new MutationObserver(again).observe(place, { childList: true });
    if (place) place.open = fold.open; // each line is a new log
  });
  on('focusin', '.nbtools-slider', (slider) => { // of ipywidgets: it has no name, and for its value the exponent
    const [handle, words] = ['[tabindex]', '.widget-readout'].map((css) => slider?.querySelector(css));
    const name = () => Object.assign(handle, { role: 'slider', ariaLabel: 'lr', ariaValueText: words.textContent });
    if (slider) name(new MutationObserver(name).observe(words, { childList: true }));
  });
  on('keydown', '.nbtools-row input, .nbtools-knob input', (field, event) => {
    if (event.key !== 'Escape' || field?.type !== 'text') return;
    Object.assign(field, { value: '' }).dispatchEvent(new Event('change', { bubbles: true }));
  });
  document.documentElement.addEventListener('pointerleave', () => ((at = null), show()));
})();
