package otel

import (
	"context"
	"fmt"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/singlefill/singlefill"
)

// A statMetric is a metric that is made from Stats at each collection.
type statMetric struct {
	name, unit, description string
	kind                    kindOfStat
	samples                 func(s *singlefill.Stats, sample sampler)
}

// A sampler takes a value of a metric, and its attributes.
type sampler func(value int64, attrs ...attribute.KeyValue)

type kindOfStat int

const (
	counter kindOfStat = iota // counts events
	current                   // counts what there is now, so that the counts of several processes can be added
)

// The counts that a metric subtracts come from counters that do not overlap, so no difference ever
// goes back.
var statMetrics = []statMetric{
	{"singlefill.gets", "{call}", "Calls of GetOrLoad and Get, by where they ended.", counter, func(s *singlefill.Stats, sample sampler) {
		near, redis := layerKey.String("near"), layerKey.String("redis")
		hit, stale, miss := resultKey.String("hit"), resultKey.String("stale"), resultKey.String("miss")
		sample(s.NearHits-s.NearStale, near, hit)
		sample(s.NearStale, near, stale)
		redisHits, redisStale := s.Hits-s.NearHits, s.StaleHits-s.NearStale
		sample(redisHits-redisStale, redis, hit)
		sample(redisStale, redis, stale)
		sample(s.Misses, redis, miss)
	}},
	{"singlefill.gets.shared", "{call}", "Hits and misses for which another call of the process read, waited or loaded.", counter,
		of(func(s *singlefill.Stats) int64 { return s.Shared })},
	{"singlefill.stale.served", "{value}", "Stale values that calls returned, by reason.", counter, func(s *singlefill.Stats, sample sampler) {
		sample(s.Stale-s.StaleOnError, reasonKey.String("revalidating"))
		sample(s.StaleOnError, reasonKey.String("load_failed"))
	}},
	{"singlefill.loads.unlocked", "{load}", "Loads without the fill lock, because Redis did not answer.", counter,
		of(func(s *singlefill.Stats) int64 { return s.LoadsUnlocked })},
	{"singlefill.loads.unlimited", "{load}", "Loads without a slot of MaxFleetLoads, because Redis did not answer.", counter,
		of(func(s *singlefill.Stats) int64 { return s.LoadsUnlimited })},
	{"singlefill.loads.running", "{load}", "Loads running now.", current,
		of(func(s *singlefill.Stats) int64 { return s.Loading })},
	{"singlefill.loads.queued", "{load}", "Loads waiting now for a slot of MaxLoads or MaxFleetLoads.", current,
		of(func(s *singlefill.Stats) int64 { return s.Queued })},
	{"singlefill.load.locks_lost", "{lock}", "Fill locks found lost while their load ran.", counter,
		of(func(s *singlefill.Stats) int64 { return s.LocksLost })},
	{"singlefill.stores", "{outcome}", "Outcomes of loads that were to be stored.", counter, func(s *singlefill.Stats, sample sampler) {
		sample(s.Stored, resultKey.String("stored"))
		sample(s.Fenced, resultKey.String("fenced"))
		sample(s.StoreErrors, resultKey.String("error"))
	}},
	{"singlefill.redis.refused", "{command}", "Commands that the server refused.", counter,
		of(func(s *singlefill.Stats) int64 { return s.Refused })},
	{"singlefill.redis.commands.queued", "{command}", "Commands waiting now for a connection of the client's pool.", current,
		of(func(s *singlefill.Stats) int64 { return s.CommandsQueued })},
	{"singlefill.breaker.open", "{breaker}", "1 while the cache holds commands back, since Redis does not answer.", current,
		func(s *singlefill.Stats, sample sampler) {
			if s.BreakerOpen {
				sample(1)
			} else {
				sample(0)
			}
		}},
	{"singlefill.breaker.opened", "{time}", "Times the cache stopped sending commands.", counter,
		of(func(s *singlefill.Stats) int64 { return s.BreakerOpens })},
	{"singlefill.bad_values", "{value}", "Stored bytes that were not an entry or could not be decoded.", counter,
		of(func(s *singlefill.Stats) int64 { return s.BadValues })},
	{"singlefill.audits", "{hit}", "Fresh hits that were compared with the source, by result.", counter, func(s *singlefill.Stats, sample sampler) {
		sample(s.Audits-s.AuditsStale, resultKey.String("current"))
		sample(s.AuditsStale, resultKey.String("stale"))
	}},
	{"singlefill.tag.calls", "{call}", "Calls of DeleteTag and ExpireTag.", counter,
		of(func(s *singlefill.Stats) int64 { return s.TagCalls })},
	{"singlefill.tag.keys", "{key}", "Keys that DeleteTag and ExpireTag found and invalidated.", counter,
		of(func(s *singlefill.Stats) int64 { return s.TagKeys })},
	{"singlefill.tag.rebuilds", "{call}", "Calls of DeleteTag and ExpireTag that had to read all values.", counter,
		of(func(s *singlefill.Stats) int64 { return s.TagRebuilds })},
	{"singlefill.tag.clears", "{call}", "Calls of DeleteTag and ExpireTag that had to remove all values.", counter,
		of(func(s *singlefill.Stats) int64 { return s.TagClears })},
	{"singlefill.near.drops", "{time}", "Times everything in memory was dropped, since Redis had lost a part of the log.", counter,
		of(func(s *singlefill.Stats) int64 { return s.NearDrops })},
}

func of(field func(*singlefill.Stats) int64) func(*singlefill.Stats, sampler) {
	return func(s *singlefill.Stats, sample sampler) { sample(field(s)) }
}

// observeStats registers a callback that reads Stats once for all their metrics.
func observeStats(meter metric.Meter, cache Cache, name attribute.KeyValue) (metric.Registration, error) {
	m := &maker{meter: meter}
	stats := make([]metric.Int64Observable, len(statMetrics))
	all := make([]metric.Observable, 0, len(statMetrics)+1)
	for i, s := range statMetrics {
		stats[i] = m.observable(s)
		all = append(all, stats[i])
	}
	proofAge, err := meter.Float64ObservableGauge("singlefill.near.proof.age", metric.WithUnit("s"),
		metric.WithDescription("Age of the newest proof that memory is current. Absent without one."))
	m.note("singlefill.near.proof.age", err)
	if m.err != nil {
		return nil, m.err
	}
	registration, err := meter.RegisterCallback(func(_ context.Context, to metric.Observer) error {
		s := cache.Stats()
		for i, instrument := range stats {
			statMetrics[i].samples(&s, func(value int64, attrs ...attribute.KeyValue) {
				to.ObserveInt64(instrument, value, metric.WithAttributes(append(attrs, name)...))
			})
		}
		if s.NearAge > 0 {
			to.ObserveFloat64(proofAge, s.NearAge.Seconds(), metric.WithAttributes(name))
		}
		return nil
	}, append(all, proofAge)...)
	if err != nil {
		return nil, fmt.Errorf("singlefill/otel: register the callback that reads Stats: %w", err)
	}
	return registration, nil
}
