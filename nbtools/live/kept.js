// Puts the last live frame in the place of the picture before it; where scripts do not run, the picture stays.
((place, tries = 0) => {
  const { page, width, height } = place.dataset;
  const before = (image) => place.compareDocumentPosition(image) & Node.DOCUMENT_POSITION_PRECEDING;
  const same = (image) => image.naturalWidth == width && image.naturalHeight == height && before(image);
  (function replace() {
    const picture = [...document.images].filter(same).at(-1);
    if (!picture && tries++ < 100) return setTimeout(replace, 50); // it may still be loading
    if (!picture || place.nextElementSibling?.className == 'nbtools-kept') return; // a script may run again
    place.after(Object.assign(document.createElement('div'), { className: 'nbtools-kept', innerHTML: page }));
    (picture.closest('.jp-OutputArea-child, .output_area') || picture).style.display = 'none';
  })();
})(this);
