package bench

import "slices"

// Quantile returns the element of the sorted xs at the share q of their number: with 0 the smallest,
// with 1 the largest. It returns 0 if xs is empty.
func Quantile(xs []float64, q float64) float64 {
	if len(xs) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(xs))
	return sorted[min(int(q*float64(len(xs))), len(xs)-1)]
}

// Median returns the middle of xs, the mean of the two in the middle if their number is even, or 0
// if xs is empty.
func Median(xs []float64) float64 {
	if len(xs) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(xs))
	return (sorted[(len(xs)-1)/2] + sorted[len(xs)/2]) / 2
}
