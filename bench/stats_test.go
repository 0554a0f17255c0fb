package bench

import "testing"

// Quantile and Median of some numbers, and of none.
func TestQuantileAndMedian(t *testing.T) {
	xs := []float64{5, 1, 4, 2, 3}
	for q, want := range map[float64]float64{0: 1, 0.2: 2, 0.5: 3, 0.99: 5, 1: 5} {
		if got := Quantile(xs, q); got != want {
			t.Errorf("Quantile(%v, %v) = %v, want %v", xs, q, got, want)
		}
	}
	if got := Median(xs); got != 3 {
		t.Errorf("Median(%v) = %v, want 3", xs, got)
	}
	if got := Median(xs[:4]); got != 3 {
		t.Errorf("Median(%v) = %v, want 3, which is between 2 and 4", xs[:4], got)
	}
	if Median(nil) != 0 || Quantile(nil, 0.5) != 0 {
		t.Error("the median or a quantile of nothing is not 0")
	}
}
