// Waiting for a turn.

/** Wait until somebody takes the function that this adds to `waiting` and calls it; the promise gets its argument. */
export function queued(waiting, signal) {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const leave = () => {
      waiting.splice(waiting.indexOf(turn), 1);
      reject(signal.reason);
    };
    const turn = (value) => {
      signal?.removeEventListener("abort", leave);
      resolve(value);
    };
    signal?.addEventListener("abort", leave, { once: true });
    waiting.push(turn);
  });
}
