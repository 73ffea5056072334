// Play a timeline: everything after a moment is covered, and the moment moves on.

const SECONDS = 10;

export class Playback {
  /** `parts`: {button, time}; `show(share)` shows the timelines until a share of their length, 1: all. */
  constructor(parts, show) {
    Object.assign(this, parts);
    this.show = show;
    this.button.addEventListener("click", () => (this.isPlaying ? this.stop() : this.play()));
    this.time.addEventListener("input", () => {
      this.stop();
      this.set(Number(this.time.value));
    });
  }

  set(share) {
    this.time.value = String(share);
    this.time.setAttribute("aria-valuetext", share >= 1 ? "all" : `${Math.round(100 * share)} % of the time`);
    this.show(share);
  }

  play() {
    this.isPlaying = true;
    this.button.textContent = "Pause";
    const from = Number(this.time.value) >= 1 ? 0 : Number(this.time.value);
    const begin = performance.now();
    const step = (now) => {
      if (!this.isPlaying) return;
      const share = Math.min(1, from + Math.max(0, now - begin) / (1000 * SECONDS));
      this.set(share);
      if (share >= 1) this.stop();
      else requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  stop() {
    this.isPlaying = false;
    this.button.textContent = "Play";
  }
}
