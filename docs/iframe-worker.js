// The search runs in a worker, which browsers refuse to pages opened as files: there it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.frame = new Promise((ready) => {
        frame.addEventListener("load", () => {
          const inside = frame.contentWindow, script = inside.document.createElement("script");
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          script.src = url;
          script.addEventListener("load", () => ready(inside));
          inside.document.head.append(script);
        }, { once: true });
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.frame.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
