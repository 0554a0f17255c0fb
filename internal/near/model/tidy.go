package model

// tidy replaces a state by one that stands for all states with the same future. So the search ends,
// although the number of records and of losses has no bound.
//
// P finds its record in the log, or drops everything. So these make no difference:
//
//   - the records before that record, and what it says: it is trimmed when there are as many
//     records behind it as the server keeps
//   - if the record is missing, all records before the newest, and what the newest says
//   - the IDs and nonces, as long as different records are different
//
// P has two records while a reply is in transit: the last known one, and the last one in the reply.
// A model that breaks the rules about IDs and nonces is left as it is.
func (m *model) tidy(s *state) {
	if !m.keeps(inclusive) || !m.keeps(nonces) {
		return
	}
	s.log.forget(s.at, s.read.last)
	s.replica.log.forget(s.at, s.read.last)

	var names names
	for i := range s.log.slice() {
		names.give(&s.log[i].position, position{uint8(i + 1), 0})
	}
	for i := range s.replica.log.slice() {
		names.give(&s.replica.log[i].position, position{uint8(i + 1), 1})
	}
	names.give(&s.at, gone)
	names.give(&s.read.last, gone)
	s.losses = 0
}

// gone is the name of all records that are neither in the log nor in the replica.
var gone = position{id: 255}

// forget removes the records before the first position that is in the log, and what the record
// there says. If none is in the log, only the newest record remains.
func (l *records) forget(positions ...position) {
	kept := l.slice()
	if len(kept) == 0 {
		return
	}
	from := len(kept) - 1
	for _, p := range positions {
		if i := l.index(p); i >= 0 {
			from = i
			break
		}
	}
	var log records
	copy(log[:], kept[from:])
	log[0] = record{position: log[0].position}
	*l = log
}

// names maps positions to their new names.
type names struct {
	n        int
	from, to [2 * maxLog]position
}

// give replaces *p by its new name. If it has none, its new name is to.
func (n *names) give(p *position, to position) {
	if *p == (position{}) {
		return
	}
	for i, from := range n.from[:n.n] {
		if from == *p {
			*p = n.to[i]
			return
		}
	}
	if to != gone {
		n.from[n.n], n.to[n.n] = *p, to
		n.n++
	}
	*p = to
}
