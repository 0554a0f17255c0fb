package prometheus

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/singlefill/singlefill"
)

// A Cache is a *singlefill.Cache of any type. The interface is for that type alone: it may get methods.
type Cache interface {
	Namespace() string
	Stats() singlefill.Stats
	AddTrace(t *singlefill.Trace)
}

// A Collector collects the metrics of caches and locks. Register it once.
type Collector struct {
	loads *loadMetrics
	locks *lockMetrics

	mu     sync.Mutex
	caches map[string][]Cache // by namespace; protected by mu
}

// NewCollector returns a [Collector] of the metrics of caches. If several have the same namespace,
// their counts are added.
func NewCollector(caches ...Cache) *Collector {
	c := &Collector{loads: newLoadMetrics(), locks: newLockMetrics(), caches: make(map[string][]Cache)}
	c.Add(caches...)
	return c
}

// Add adds the metrics of more caches. Add each cache once. A cache that is closed keeps its counts.
func (c *Collector) Add(caches ...Cache) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, cache := range caches {
		namespace := cache.Namespace()
		c.caches[namespace] = append(c.caches[namespace], cache)
		cache.AddTrace(c.loads.trace(namespace))
	}
}

// Describe implements [prometheus.Collector].
func (c *Collector) Describe(to chan<- *prometheus.Desc) {
	for _, m := range statMetrics {
		to <- m.desc
	}
	for _, v := range c.vectors() {
		v.Describe(to)
	}
}

// Collect implements [prometheus.Collector].
func (c *Collector) Collect(to chan<- prometheus.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for namespace, caches := range c.caches {
		var sum singlefill.Stats
		for _, cache := range caches {
			add(&sum, cache.Stats())
		}
		for _, m := range statMetrics {
			m.collect(to, namespace, &sum)
		}
	}
	for _, v := range c.vectors() {
		v.Collect(to)
	}
}

func (c *Collector) vectors() []prometheus.Collector { return append(c.loads.all(), c.locks.all()...) }
