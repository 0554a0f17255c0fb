package versions

import (
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
)

// This file, too, is compiled in the tree of the old version.

func TestMain(m *testing.M) { redistest.Ring(m) }
