// Shows the values under the pointer in all charts of a live view, at the same place of their x axis. A frame replaces
// the one before it up to four times a second, so the values are drawn again when one arrives. What is written is
// text, never markup. Where a front end runs no scripts, the charts are as they are. Escape empties a field of the
// form, which its kernel then fills with the value that is in effect.
(() => {
  if (window.nbtoolsPointer) return; // one for all live views of a page
  window.nbtoolsPointer = true;
  let at = null; // the pointer's place in the window
  const part = (parent, name, words = '') => {
    const made = document.createElement(name);
    made.textContent = words;
    return parent.appendChild(made);
  };
  const digits = (value) => {
    const size = Math.abs(value);
    if (size >= 999.5) return Math.round(value).toLocaleString('en');
    return size && size < 1e-3 ? value.toExponential(2) : value.toPrecision(3);
  };
  const nearest = (line, x) => {
    const points = line.points;
    let best = points[0];
    for (let i = 1; i < points.length; i++) if (Math.abs(points[i].x - x) < Math.abs(best.x - x)) best = points[i];
    return best;
  };
  const value = (plot, height) => {
    const [low, high] = [Number(plot.dataset.low), Number(plot.dataset.high)];
    return 'log' in plot.dataset ? low * (high / low) ** height : low + height * (high - low);
  };
  const write = (plot, share, where) => {
    const [, , width, height] = plot.querySelector('svg').getAttribute('viewBox').split(' ').map(Number);
    const lines = [...plot.querySelectorAll('polyline[data-name]')].filter((line) => line.points.length);
    if (!lines.length) return; // metrics before the first evaluation
    const rule = part(plot, 'div');
    rule.className = share > 0.5 ? 'nbt-at nbt-left' : 'nbt-at';
    rule.style.left = `${100 * share}%`;
    const box = part(rule, 'div');
    if (where) part(box, 'div', where);
    for (const line of lines) {
      const point = nearest(line, share * width);
      const row = part(box, 'div');
      part(row, 'i').style.background = line.getAttribute('stroke');
      if (lines.length > 1) part(row, 'span', `${line.dataset.name} `);
      part(row, 'b', digits(value(plot, 1 - point.y / height)));
    }
  };
  const show = () => {
    document.querySelectorAll('.nbt-at').forEach((old) => old.remove());
    const under = at && document.elementFromPoint(...at)?.closest('.nbt-plot');
    if (!under) return observer.disconnect();
    const grid = under.closest('.nbt-grid');
    const ends = under.getBoundingClientRect();
    const share = Math.min(Math.max((at[0] - ends.left) / ends.width, 0), 1);
    const [first, last] = [Number(grid.dataset.first), Number(grid.dataset.last)];
    const x = first + share * (last - first);
    const place = `${grid.dataset.x} ${grid.dataset.x === 'minutes' ? digits(x) : Math.round(x).toLocaleString('en')}`;
    for (const plot of grid.querySelectorAll('.nbt-plot')) write(plot, share, plot === under ? place : '');
    observer.observe(grid.closest('.nbt').parentElement, { childList: true }); // what a frame is put into
  };
  const observer = new MutationObserver(show);
  document.addEventListener('pointermove', (event) => {
    at = event.target.closest?.('.nbt-plot') ? [event.clientX, event.clientY] : null;
    if (at || document.querySelector('.nbt-at')) show();
  });
  document.addEventListener('keydown', (event) => {
    const field = event.key === 'Escape' && event.target.closest?.('.nbtools-row, .nbtools-knob') && event.target;
    if (field?.type !== 'text') return;
    field.value = '';
    for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind, { bubbles: true }));
  });
  document.documentElement.addEventListener('pointerleave', () => ((at = null), show()));
})();
