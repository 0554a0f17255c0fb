package redistest

import (
	"bufio"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

// readFrame reads each kind of value to its end.
func TestReadFrame_End(t *testing.T) {
	t.Parallel()
	frames := []string{
		"+OK\r\n", "-ERR no\r\n", ":-7\r\n", "$0\r\n\r\n", "$5\r\na\r\nb\n\r\n", "$-1\r\n",
		"*0\r\n", "*-1\r\n", "*2\r\n*1\r\n:1\r\n$1\r\nx\r\n", "_\r\n", ",1.5\r\n", "#t\r\n",
		"!3\r\nERR\r\n", "=7\r\ntxt:abc\r\n", "(123456789012345678901\r\n",
		"%2\r\n+a\r\n:1\r\n+b\r\n*1\r\n:2\r\n", "~2\r\n:1\r\n:2\r\n",
		">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n",
		// Attributes before and inside a value.
		"|1\r\n+ttl\r\n:3\r\n*2\r\n:1\r\n|1\r\n+a\r\n+b\r\n:2\r\n",
		"PING now\r\n",
		"$100000\r\n" + strings.Repeat("\r", 100000) + "\r\n",
	}
	for _, reader := range []io.Reader{
		strings.NewReader(strings.Join(frames, "")),
		iotest.OneByteReader(strings.NewReader(strings.Join(frames, ""))),
	} {
		r := bufio.NewReader(reader)
		for _, want := range frames {
			f, err := readFrame(r)
			if string(f.raw) != want || err != nil {
				t.Fatalf("frame %.50q, %v, not %.50q", f.raw, err, want)
			}
			if f.isPush() != strings.HasPrefix(want, ">") {
				t.Errorf("push: %v for %q", f.isPush(), want)
			}
		}
		if _, err := readFrame(r); err != io.EOF {
			t.Errorf("end: %v", err)
		}
	}
}

// readFrame returns the command and its arguments.
func TestReadFrame_Command(t *testing.T) {
	t.Parallel()
	for in, want := range map[string][]string{
		"*3\r\n$3\r\nSET\r\n$0\r\n\r\n$4\r\na\r\nb\r\n": {"SET", "", "a\r\nb"},
		"set k  v\r\n": {"set", "k", "v"},
	} {
		f, err := readFrame(bufio.NewReader(strings.NewReader(in)))
		if !slices.Equal(f.bulks, want) || err != nil {
			t.Errorf("%q: %q, %v", in, f.bulks, err)
		}
	}
}
