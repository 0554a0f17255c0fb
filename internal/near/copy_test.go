package near

import (
	"testing"
	"unsafe"
)

// What a hit reads of a copy is in one line of memory, together with a string behind it: see Copy.
func TestCopy_OneLine(t *testing.T) {
	if unsafe.Sizeof(uintptr(0)) != 8 {
		t.Skip("lines are counted for processors of 64 bits")
	}
	var box struct {
		_ Copy
		_ string
	}
	if begins, size := unsafe.Offsetof(Copy{}.checked), unsafe.Sizeof(box); begins != 64 || size <= 112 || size > 128 {
		t.Errorf("a hit reads a copy from byte %d on, want 64; with a string it has %d bytes, want 113 to 128", begins, size)
	}
}
