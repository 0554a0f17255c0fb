// Package cache_test asserts promises of the cache that hold between processes: each is an OS
// process that can be killed and frozen, Redis is a server, and loads count themselves.
package cache_test

import (
	"testing"

	"github.com/singlefill/singlefill/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Ring(m) }
