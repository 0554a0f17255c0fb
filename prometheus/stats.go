package prometheus

import (
	"reflect"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/singlefill/singlefill"
)

// A statMetric is a metric that is made from Stats at each scrape.
type statMetric struct {
	desc    *prometheus.Desc
	kind    prometheus.ValueType
	samples func(s *singlefill.Stats, sample sampler)
}

// A sampler takes a value of a metric, and the values of its labels.
type sampler func(value float64, labels ...string)

func (m statMetric) collect(to chan<- prometheus.Metric, namespace string, s *singlefill.Stats) {
	m.samples(s, func(value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(m.desc, m.kind, value, append([]string{namespace}, labels...)...)
	})
}

// The counts that a metric subtracts come from counters that do not overlap, so no difference ever
// goes back.
var statMetrics = []statMetric{
	counter("gets_total", "Calls of GetOrLoad and Get, by where they ended.", func(s *singlefill.Stats, sample sampler) {
		sample(float64(s.NearHits-s.NearStale), "near", "hit")
		sample(float64(s.NearStale), "near", "stale")
		redisHits, redisStale := s.Hits-s.NearHits, s.StaleHits-s.NearStale
		sample(float64(redisHits-redisStale), "redis", "hit")
		sample(float64(redisStale), "redis", "stale")
		sample(float64(s.Misses), "redis", "miss")
	}, "layer", "result"),
	count("gets_shared_total", "Hits and misses for which another call of the process read, waited or loaded.", func(s *singlefill.Stats) int64 { return s.Shared }),
	counter("stale_served_total", "Stale values that calls returned, by reason.", func(s *singlefill.Stats, sample sampler) {
		sample(float64(s.Stale-s.StaleOnError), "revalidating")
		sample(float64(s.StaleOnError), "load_failed")
	}, "reason"),
	count("loads_unlocked_total", "Loads without the fill lock, because Redis did not answer.", func(s *singlefill.Stats) int64 { return s.LoadsUnlocked }),
	count("loads_unlimited_total", "Loads without a slot of MaxFleetLoads, because Redis did not answer.", func(s *singlefill.Stats) int64 { return s.LoadsUnlimited }),
	gauge("loads_running", "Loads running now.", func(s *singlefill.Stats) int64 { return s.Loading }),
	gauge("loads_queued", "Loads waiting now for a slot of MaxLoads or MaxFleetLoads.", func(s *singlefill.Stats) int64 { return s.Queued }),
	count("load_locks_lost_total", "Fill locks found lost while their load ran.", func(s *singlefill.Stats) int64 { return s.LocksLost }),
	counter("stores_total", "Outcomes of loads that were to be stored.", func(s *singlefill.Stats, sample sampler) {
		sample(float64(s.Stored), "stored")
		sample(float64(s.Fenced), "fenced")
		sample(float64(s.StoreErrors), "error")
	}, "result"),
	count("redis_refused_total", "Commands that the server refused.", func(s *singlefill.Stats) int64 { return s.Refused }),
	gauge("redis_commands_queued", "Commands waiting now for a connection of the client's pool.", func(s *singlefill.Stats) int64 { return s.CommandsQueued }),
	gauge("breaker_open", "1 while the cache holds commands back, since Redis does not answer.", func(s *singlefill.Stats) int64 {
		if s.BreakerOpen {
			return 1
		}
		return 0
	}),
	count("breaker_opened_total", "Times the cache stopped sending commands.", func(s *singlefill.Stats) int64 { return s.BreakerOpens }),
	count("bad_values_total", "Stored bytes that were not an entry or could not be decoded.", func(s *singlefill.Stats) int64 { return s.BadValues }),
	counter("audits_total", "Fresh hits that were compared with the source, by result.", func(s *singlefill.Stats, sample sampler) {
		sample(float64(s.Audits-s.AuditsStale), "current")
		sample(float64(s.AuditsStale), "stale")
	}, "result"),
	count("tag_calls_total", "Calls of DeleteTag and ExpireTag.", func(s *singlefill.Stats) int64 { return s.TagCalls }),
	count("tag_keys_total", "Keys that DeleteTag and ExpireTag found and invalidated.", func(s *singlefill.Stats) int64 { return s.TagKeys }),
	count("tag_rebuilds_total", "Calls of DeleteTag and ExpireTag that had to read all values.", func(s *singlefill.Stats) int64 { return s.TagRebuilds }),
	count("tag_clears_total", "Calls of DeleteTag and ExpireTag that had to remove all values.", func(s *singlefill.Stats) int64 { return s.TagClears }),
	count("near_drops_total", "Times everything in memory was dropped, since Redis had lost a part of the log.", func(s *singlefill.Stats) int64 { return s.NearDrops }),
	{newDesc("near_proof_age_seconds", "Age of the newest proof that memory is current. Absent without one."), prometheus.GaugeValue,
		func(s *singlefill.Stats, sample sampler) {
			if s.NearAge > 0 {
				sample(s.NearAge.Seconds())
			}
		}},
}

func newDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("singlefill_"+name, help, append([]string{"cache"}, labels...), nil)
}

func counter(name, help string, samples func(*singlefill.Stats, sampler), labels ...string) statMetric {
	return statMetric{newDesc(name, help, labels...), prometheus.CounterValue, samples}
}

func count(name, help string, value func(*singlefill.Stats) int64) statMetric {
	return counter(name, help, func(s *singlefill.Stats, sample sampler) { sample(float64(value(s))) })
}

func gauge(name, help string, value func(*singlefill.Stats) int64) statMetric {
	m := count(name, help, value)
	m.kind = prometheus.GaugeValue
	return m
}

// add adds the counts of s to sum. An age is the age of the older proof; a breaker is open if either
// is.
func add(sum *singlefill.Stats, s singlefill.Stats) {
	to, from := reflect.ValueOf(sum).Elem(), reflect.ValueOf(s)
	for i := range to.NumField() {
		switch field := to.Field(i); v := from.Field(i).Interface().(type) {
		case int64:
			field.SetInt(field.Int() + v)
		case bool:
			field.SetBool(field.Bool() || v)
		case time.Duration:
			field.SetInt(max(field.Int(), int64(v)))
		}
	}
}
