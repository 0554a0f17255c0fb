package bench

import "slices"

// Quantile returns the smallest of xs that is not below a share q of them; 0 if there are none.
func Quantile(xs []float64, q float64) float64 {
	if len(xs) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(xs))
	return sorted[min(int(q*float64(len(xs))), len(xs)-1)]
}

// Median returns the middle of xs, between the two in the middle if their number is even; 0 if there are none.
func Median(xs []float64) float64 {
	if len(xs) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(xs))
	return (sorted[(len(xs)-1)/2] + sorted[len(xs)/2]) / 2
}
