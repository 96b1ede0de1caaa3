// The charts of a page under the pointer: values of all curves at the same place of their x axis; drag to zoom, double
// click back; a click on the legend hides a curve. A frame replaces the one before it up to four times a second, so all
// that is drawn anew when one arrives. What is written is text, never markup. Where a front end runs no scripts, the
// charts are as they are. Escape empties a field of the form, which its kernel then fills with the value in effect.
(() => {
  if (window.nbtoolsCharts) return; // one for all views of a page
  window.nbtoolsCharts = new WeakMap(); // what a frame is put into → {zoom: [first, last, x], hidden}
  const [WIDTH, HEIGHT] = [2000, 10000];
  let at = null; // the pointer's place in the window
  let from = null; // where a drag began: {grid, share}
  const part = (parent, name, words = '', look = '') => {
    const made = document.createElement(name);
    made.textContent = words;
    made.className = look;
    return parent.appendChild(made);
  };
  const digits = (value) => {
    const size = Math.abs(value);
    if (size >= 999.5) return Math.round(value).toLocaleString('en');
    return size && size < 1e-3 ? value.toExponential(2) : value.toPrecision(3);
  };
  const lines = (plot) => [...plot.querySelectorAll('g[data-name]:not([display]) > polyline:not(.nbt-faint)')];
  const seen = (plot) => plot.querySelector('svg').viewBox.baseVal;
  const value = (plot, y) => {
    const [low, high, height] = [Number(plot.dataset.low), Number(plot.dataset.high), 1 - y / HEIGHT];
    return 'log' in plot.dataset ? low * (high / low) ** height : low + height * (high - low);
  };
  const along = (grid, x) => Number(grid.dataset.first) + (x / WIDTH) * (grid.dataset.last - grid.dataset.first);
  const share = (plot, x) => {
    const ends = plot.getBoundingClientRect();
    return Math.min(Math.max((x - ends.left) / ends.width, 0), 1);
  };
  const stateOf = (grid) => {
    const place = grid.closest('.nbt').parentElement; // the same for all frames
    if (!nbtoolsCharts.has(place)) {
      nbtoolsCharts.set(place, { zoom: null, hidden: new Set() });
      new MutationObserver(() => place.querySelectorAll('.nbt-grid').forEach(apply)).observe(place, { childList: true });
    }
    return nbtoolsCharts.get(place);
  };
  const apply = (grid) => {
    const { zoom, hidden } = stateOf(grid);
    if (grid.plain) grid.innerHTML = grid.plain;
    grid.plain = grid.innerHTML;
    for (const key of grid.querySelectorAll('.nbt-key span'))
      if (hidden.has(nameOf(key))) {
        key.classList.add('nbt-off');
        const plot = key.closest('.nbt-head').nextElementSibling;
        for (const line of plot.querySelectorAll('g[data-name]'))
          if (line.dataset.name === key.title) line.setAttribute('display', 'none');
      }
    if (zoom && zoom[2] === grid.dataset.x) for (const plot of grid.querySelectorAll('.nbt-plot')) stretch(grid, plot, zoom);
    show();
  };
  const stretch = (grid, plot, [first, last]) => {
    const span = grid.dataset.last - grid.dataset.first;
    const [left, right] = [first, last].map((x) => ((x - grid.dataset.first) / span) * WIDTH);
    const ys = lines(plot).flatMap((line) => [...line.points].filter((p) => p.x >= left && p.x <= right).map((p) => p.y));
    const [top, bottom] = ys.length ? [Math.max(Math.min(...ys) - 200, 0), Math.min(Math.max(...ys) + 200, HEIGHT)] : [0, HEIGHT];
    plot.querySelector('svg').setAttribute('viewBox', `${left} ${top} ${right - left} ${bottom - top}`);
    plot.classList.add('nbt-zoom');
    plot.querySelectorAll('.nbt-x, .nbt-y:not([style*="margin"])').forEach((old) => old.remove());
    for (const k of [0.1, 0.5, 0.9]) {
      part(plot, 'span', digits(first + k * (last - first)), 'nbt-x').style.left = `${100 * k}%`;
      const level = Number(value(plot, top + k * (bottom - top)).toPrecision(2));
      part(plot, 'span', level, 'nbt-y').style.top = `${100 * k}%`;
    }
  };
  const nameOf = (key) => `${key.closest('.nbt-head').firstChild.firstChild.textContent} ${key.title}`;
  const write = (plot, place, where) => {
    const box = seen(plot);
    const rule = part(plot, 'div', '', place > 0.5 ? 'nbt-at nbt-left' : 'nbt-at');
    rule.style.left = `${100 * place}%`;
    const values = part(rule, 'div', where);
    for (const line of lines(plot).filter((each) => each.points.length)) {
      const x = box.x + place * box.width;
      const point = [...line.points].reduce((a, b) => (Math.abs(b.x - x) < Math.abs(a.x - x) ? b : a));
      const row = part(values, 'div');
      part(row, 'i').style.background = line.getAttribute('stroke');
      if (lines(plot).length > 1) part(row, 'span', `${line.parentElement.dataset.name} `);
      part(row, 'b', digits(value(plot, point.y)));
    }
    if (!values.textContent) rule.remove(); // metrics before the first evaluation
  };
  const show = () => {
    document.querySelectorAll('.nbt-at, .nbt-drag').forEach((old) => old.remove());
    const under = at && document.elementFromPoint(...at)?.closest('.nbt-plot');
    if (!under) return;
    const [grid, place] = [under.closest('.nbt-grid'), share(under, at[0])];
    stateOf(grid); // which watches for frames
    const x = along(grid, seen(under).x + place * seen(under).width);
    const where = `${grid.dataset.x} ${grid.dataset.x === 'minutes' ? digits(x) : Math.round(x).toLocaleString('en')}`;
    for (const plot of grid.querySelectorAll('.nbt-plot')) {
      write(plot, place, plot === under ? where : '');
      if (!from) continue;
      const band = part(plot, 'div', '', 'nbt-drag').style;
      [band.left, band.width] = [Math.min(from, place), Math.abs(from - place)].map((each) => `${100 * each}%`);
    }
  };
  const zoom = (plot, ends) => {
    const grid = plot.closest('.nbt-grid');
    const box = seen(plot);
    stateOf(grid).zoom = ends && [...ends.map((end) => along(grid, box.x + end * box.width)), grid.dataset.x];
    apply(grid);
  };
  const on = (kind, act) => document.addEventListener(kind, act);
  on('pointermove', (event) => {
    at = event.target.closest?.('.nbt-plot') ? [event.clientX, event.clientY] : null;
    if (at || document.querySelector('.nbt-at')) show();
  });
  on('pointerdown', (event) => {
    const plot = event.target.closest?.('.nbt-plot');
    from = plot && !event.button ? share(plot, event.clientX) || 1e-9 : null;
  });
  on('pointerup', (event) => {
    const [plot, start] = [event.target.closest?.('.nbt-plot'), from];
    from = null;
    const ends = plot && start && [start, share(plot, event.clientX)].sort((a, b) => a - b);
    if (ends && ends[1] - ends[0] > 0.02) zoom(plot, ends);
  });
  on('dblclick', (event) => event.target.closest?.('.nbt-plot') && zoom(event.target.closest('.nbt-plot'), null));
  on('click', (event) => {
    const key = event.target.closest?.('.nbt-key span');
    if (!key) return;
    const { hidden } = stateOf(key.closest('.nbt-grid'));
    hidden.delete(nameOf(key)) || hidden.add(nameOf(key));
    apply(key.closest('.nbt-grid'));
  });
  on('keydown', (event) => {
    const field = event.key === 'Escape' && event.target.closest?.('.nbtools-row, .nbtools-knob') && event.target;
    if (field?.type !== 'text') return;
    field.value = '';
    for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, { bubbles: true }));
  });
  document.documentElement.addEventListener('pointerleave', () => ((at = null), show()));
})();
