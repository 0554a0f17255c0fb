//go:build !race

package redistest

const Race = false
