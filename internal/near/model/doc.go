// Package model is a model of the protocol of package near, and a search through all its states.
//
// The model has one process with values in memory, P, and the server. P reads the log, asks Redis
// for the key, loads it, and calls Delete. The other processes, of which there may be any number,
// appear only in what they do to the server: they store values, delete the key and append records.
//
// Any of them may take the next step at any time, or none for as long as it likes. So replies take
// any time, and P may be slow or frozen. Replies get lost. The log is trimmed, flushed, expires, or
// falls back to what a replica has of it.
//
// The search visits every state that can be reached, breadth first, and checks the invariants in
// each. So it finds the shortest way to a violation. The number of Deletes, the length of the log
// and MaxLag are bounded. The number of reads, loads, losses, ticks and records about other keys is
// not.
//
// The tests also break each rule of the protocol and expect a violation.
//
// # What the model leaves out
//
// One key has values. Keys share only stripes and the log, so the others appear as records about
// the same stripe or about another one.
//
// A Set is a Delete that another process follows with a store. An Expire is a Delete, too: memory
// must not serve the old value as fresh.
//
// A Delete that fails is one that never returns. It promises nothing, whether or not its commands
// are executed.
//
// P has one value of the key, in transit or in memory. Each value comes with one reply, and
// replies do not affect each other.
//
// P takes a generation in the same step in which the server executes the command. If the generation
// changed in between, the reply would be useless.
package model
