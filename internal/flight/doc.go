// Package flight lets the callers of one process share work on the same key: [Reads] shares
// commands that read it, [Fills] shares the work of bringing a value, and [Slots] limits how many
// loads run at once.
//
// It does what singleflight does, and also decides whether a result is too old for a caller that
// arrived while the work was already running.
package flight
