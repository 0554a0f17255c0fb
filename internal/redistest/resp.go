package redistest

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
)

var errNotRESP = errors.New("redistest: proxy: not RESP")

// A frame is one request or reply, as sent.
type frame struct {
	raw   []byte
	bulks []string // the strings in it; for a request, the command and its arguments
}

// readFrame reads the next RESP2 or RESP3 value. An attribute belongs to the value after it. A line
// of another kind is an inline command.
func readFrame(r *bufio.Reader) (frame, error) {
	var f frame
	for missing := 1; missing > 0; missing-- {
		line, err := r.ReadBytes('\n')
		if err != nil {
			return f, err
		}
		f.raw = append(f.raw, line...)
		line = bytes.TrimSpace(line)
		if len(line) == 0 {
			return f, fmt.Errorf("%w: empty line in %.100q", errNotRESP, f.raw)
		}
		switch line[0] {
		case '+', '-', ':', '_', ',', '#', '(':
			continue
		case '$', '!', '=', '*', '~', '>', '%', '|':
		default:
			for _, word := range bytes.Fields(line) {
				f.bulks = append(f.bulks, string(word))
			}
			continue
		}
		n, err := strconv.Atoi(string(line[1:]))
		if err != nil {
			return f, fmt.Errorf("%w: no length in %.100q", errNotRESP, line)
		}
		if n < 0 {
			continue // a RESP2 null
		}
		switch line[0] {
		case '$', '!', '=':
			start := len(f.raw)
			f.raw = append(f.raw, make([]byte, n+2)...)
			if _, err := io.ReadFull(r, f.raw[start:]); err != nil {
				return f, err
			}
			f.bulks = append(f.bulks, string(f.raw[start:start+n]))
		case '*', '~', '>':
			missing += n
		case '%':
			missing += 2 * n
		case '|':
			missing += 2*n + 1
		}
	}
	return f, nil
}
