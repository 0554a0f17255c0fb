-- Remove an entry, and invalidate a running load, if the key still holds that entry.
--
-- KEYS  1 value  2 lock
-- ARGV  1 the entry's 8 random bytes
--
-- Returns 1 removed, 0 the key holds another entry, or none.

local random = redis.pcall('GETRANGE', KEYS[1], 27, 34)
if type(random) == 'table' and not string.find(random.err, 'WRONGTYPE', 1, true) then return random end
if random ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
if redis.call('DEL', KEYS[2]) == 1 then wake(KEYS[2], '') end
return 1
