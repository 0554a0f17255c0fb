package redistest

import (
	"encoding/json"
	"iter"
)

// A test and its children may talk in values instead of lines: the test gives an order, and the child
// reports. Each is a line of JSON.

// Order sends the child a value, which Orders of the child yields.
func (p *Process) Order(order any) {
	p.t.Helper()
	line, err := json.Marshal(order)
	Must(p.t, err)
	p.Send(string(line))
}

// Hear waits for the next line of the child, as Line does, and decodes it: what Report has sent.
func (p *Process) Hear(report any) {
	p.t.Helper()
	line := p.Line()
	if err := json.Unmarshal([]byte(line), report); err != nil {
		p.fail("said " + line + ", which is no report: " + err.Error())
	}
}

// Orders yields what the parent sends with Order, until there is no more.
func Orders[O any](c *Child) iter.Seq[O] {
	return func(yield func(O) bool) {
		for line, ok := c.Next(); ok; line, ok = c.Next() {
			var order O
			if err := json.Unmarshal([]byte(line), &order); err != nil {
				panic(err)
			}
			if !yield(order) {
				return
			}
		}
	}
}

// Report sends the parent a value.
func (c *Child) Report(report any) {
	line, err := json.Marshal(report)
	if err != nil {
		panic(err)
	}
	c.Say("%s", line)
}
