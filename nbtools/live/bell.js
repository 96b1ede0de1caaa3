// As the run begins: shows the button that asks the browser's permission, where it has not been asked yet. As it ends:
// tells a page that is not looked at, in its title until it is, and by a notification where that is allowed.
((place) => {
  const { title, text } = place.dataset;
  const ask = place.querySelector('button');
  const permission = 'Notification' in window && Notification.permission; // on http only localhost is asked
  if (ask) {
    if (permission === 'default') ask.style.display = '';
    ask.onclick = () => Notification.requestPermission().then(() => (ask.style.display = 'none'));
    return;
  }
  const looking = () => !document.hidden && document.hasFocus();
  if (looking()) return;
  if (permission === 'granted') {
    try {
      new Notification(title, { body: text, tag: title });
    } catch {} // Chrome on Android wants a service worker
  }
  let before = '';
  const timer = setInterval(() => {
    if (looking()) {
      clearInterval(timer);
      if (document.title === title) document.title = before;
    } else if (document.title !== title) {
      before = document.title; // Jupyter's own, which it writes again when the cell ends
      document.title = title;
    }
  }, 200);
})(this.parentElement);
