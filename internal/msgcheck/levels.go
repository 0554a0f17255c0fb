package msgcheck

// maxLevels is how many levels of nesting are counted apart. The last one has all that is deeper, too.
const maxLevels = 16

// Levels are the counts of a document by level: the items and entries of the outermost container are at
// level 0, the items and entries of the containers in it at level 1.
type Levels [maxLevels]Counts

// Levels returns the counts of a checked document by level.
func (d Doc) Levels() *Levels {
	var levels Levels
	var open []int // values missing from each open container
	for pos := 0; pos < len(d.data); {
		h, err := parse(d.data, pos)
		if err != nil {
			break // not reached: Check has parsed the same bytes
		}
		pos = h.next
		n, at := 0, &levels[min(len(open), maxLevels-1)]
		switch h.kind {
		case array:
			n = h.n
			at.Items += h.n
		case mapping:
			n = 2 * h.n
			at.Entries += h.n
			at.Maps += min(h.n, 1)
		default:
			pos += h.n
		}
		if n > 0 {
			open = append(open, n)
			continue
		}
		for len(open) > 0 { // a value is complete, and so may be the containers that it ends
			last := len(open) - 1
			if open[last]--; open[last] > 0 {
				break
			}
			open = open[:last]
		}
	}
	return &levels
}

// JSONLevels returns counts of a JSON document by level that are at least the true ones. In bytes that
// are not JSON it may miss some.
func JSONLevels(data []byte) *Levels {
	var levels Levels
	depth := -1 // the level of what the innermost container has
	for i := 0; i < len(data); i++ {
		at := &levels[min(max(depth, 0), maxLevels-1)]
		switch data[i] {
		case '"':
			for i++; i < len(data) && data[i] != '"'; i++ {
				if data[i] == '\\' {
					i++
				}
			}
		case '[', '{':
			depth++
			at = &levels[min(max(depth, 0), maxLevels-1)]
			if data[i] == '[' {
				at.Items++
			} else {
				at.Maps++
			}
		case ']', '}':
			depth--
		case ',':
			at.Items++
		case ':':
			at.Entries++
		}
	}
	return &levels
}
